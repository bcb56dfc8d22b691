"""`POST /v1/batch/completions`, `/batch/generate`: many prompts, each a request of priority batch.

They begin in their order, and one of them at a time waits for a slot, or for the limits of its key:
a batch has one place in the queue of its model, and takes slots that interactive requests leave
idle. A client that leaves cancels them all.

The response is one object, or a line of JSON for each result, in the order in which results are
complete; the last line has the figures. The result of a prompt that failed also has `error`, in the
shape of every error. Names and defaults are those of realizar 0.8.5: `GpuBatchRequest`,
`GpuBatchResult`, `ContinuousBatchResponse` and `GpuBatchStats`; every other member is
llama-server's and is sent with each prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.batches.own_requests import OwnAnswer, OwnRequests, refusal
from proxy.cache.prompt import CacheOwner
from proxy.common.headers import HOP, JSON
from proxy.errors import BadRequest, LimitExceeded, UpstreamFailed
from proxy.forward.arrays import GATHERED_MAX_BYTES
from proxy.forward.response import ClientResponse
from proxy.http.body import Share, check_complexity, members_of, read_body
from proxy.request.limits import check
from proxy.request.models import ModelNames
from proxy.request.request import cache_owner, client_of, named_model
from proxy.router.batch_queue import BatchQueue, Turn
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind, choices_of

# Source: realizar 0.8.5, src/api, `default_max_tokens` and `default_top_k`.
_MAX_TOKENS: Final = 50
_DEFAULTS: Final = MappingProxyType({"temperature": 0.0, "top_k": 50, "stop": []})
# Read here, or set: the answer is not a stream, and has the members that results are made of.
_OURS: Final = frozenset({"prompts", "prompt", "max_tokens", "response_fields"})
_NUMBER: Final = (int, float)
EMPTY_PROMPT: Final = "Prompt cannot be empty"


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompts, and the members of llama-server's `/completion` that they share."""

    prompts: Sequence[str]
    shared: Mapping[str, Any]

    def members(self, index: int) -> Mapping[str, Any]:
        """Return the body for one prompt."""
        return {**self.shared, "prompt": self.prompts[index]}


def read_batch(members: Mapping[str, Any], max_prompts: int) -> PromptBatch:
    """Read a body.

    Raises:
        BadRequest: A prompt is empty or there is none, or a member has a wrong type.
        LimitExceeded: There are too many prompts.
    """
    prompts = prompts_of(members, max_prompts)
    _check_numbers(members)
    if choices_of(EndpointKind.LLAMA_COMPLETION, members) > 1:
        raise BadRequest("n must be 1; repeat a prompt for several answers to it")
    shared = {name: value for name, value in members.items() if name not in _OURS}
    max_tokens = members.get("max_tokens")
    if max_tokens is not None or "n_predict" not in shared:
        shared["n_predict"] = _MAX_TOKENS if max_tokens is None else max_tokens
    return PromptBatch(prompts, {**_DEFAULTS, **shared, "return_tokens": True})


def prompts_of(members: Mapping[str, Any], max_prompts: int) -> list[str]:
    """Return the prompts of a body; raises as `read_batch` does."""
    prompts = members.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompts must be a list of strings")
    if not prompts:
        raise BadRequest("Prompts array cannot be empty")
    if not all(prompts):
        raise BadRequest(EMPTY_PROMPT)
    if len(prompts) > max_prompts:
        raise LimitExceeded(
            f"prompts has {len(prompts)} entries, more than {max_prompts}; "
            "send fewer, or raise queue_size under [proxy.batch]"
        )
    return prompts


def _check_numbers(members: Mapping[str, Any]) -> None:
    # An engine generates one token even if the limit is 0.
    for name, least in (("max_tokens", 1), ("top_k", 0)):
        value = members.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadRequest(f"{name} must be a whole number, {least} or more")
    value = members.get("temperature", 0)
    if not isinstance(value, _NUMBER) or isinstance(value, bool):
        raise BadRequest("temperature must be a number")
    stop = members.get("stop", [])
    if not isinstance(stop, str) and not _is_texts(stop):
        raise BadRequest("stop must be a list of strings")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The answer to one prompt.

    Attributes:
        index: Of the prompt, from 0.
        token_ids: Generated, one that ended the text included.
        num_generated: Their number.
        batched: Whether the prompt began with others as a batch.
        batch_size: Prompts that began together; 1 for a prompt that ran singly.
        latency_ms: From joining the queue to the whole answer.
        error: Why there is no answer.
    """

    index: int
    token_ids: Sequence[int] = ()
    text: str = ""
    num_generated: int = 0
    batched: bool = False
    batch_size: int = 1
    latency_ms: float = 0.0
    error: Mapping[str, Any] | None = None

    def json(self) -> bytes:
        members = asdict(self)
        if self.error is None:
            del members["error"]
        return orjson.dumps(members)


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The figures of one batch.

    Attributes:
        batch_size: Prompts.
        gpu_used: Whether an engine that answered has layers on a GPU; those of other machines count
            as without.
        total_tokens: Generated.
    """

    batch_size: int
    gpu_used: bool
    total_tokens: int
    processing_time_ms: float
    throughput_tps: float


def result_of(index: int, answer: OwnAnswer, path: str) -> BatchResult:
    """Return the result of a prompt; `path` is that of the endpoint that answered."""
    try:
        said = orjson.loads(answer.body)
        if answer.status >= 400:
            return BatchResult(index, error=said["error"])
        return BatchResult(index, said["tokens"], said["content"], len(said["tokens"]))
    except (ValueError, LookupError, TypeError) as error:
        failure = UpstreamFailed(f"the answer to prompt {index} has another format: {error!r}")
        return result_of(index, refusal(path, failure), path)


def stats_of(
    batch_size: int, total_tokens: int, duration_s: float, *, gpu_used: bool
) -> BatchStats:
    return BatchStats(
        batch_size=batch_size,
        gpu_used=gpu_used,
        total_tokens=total_tokens,
        processing_time_ms=round(duration_s * 1000, 3),
        throughput_tps=round(total_tokens / duration_s, 3) if duration_s > 0 else 0.0,
    )


LINES: Final = "application/x-ndjson"
# Source: realizar 0.8.5, `GenerateResponse`.
_PLAIN: Final = ("token_ids", "text", "num_generated")


class BatchRefused(Exception):
    """The answer to one prompt, an error, is the answer to all."""

    def __init__(self, answer: OwnAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class ResultWriter(Protocol):
    """The methods raise ConnectionError if the client has left."""

    async def begin(self) -> None:
        """The batch is accepted."""

    async def add(self, result: BatchResult, answer: OwnAnswer, /) -> None:
        """Take the result of a prompt, made of this answer; may raise BatchRefused."""

    async def finish(self, stats: BatchStats, /) -> None:
        """All are there."""


class LinesWriter:
    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        await self._response.begin(200, CIMultiDict({"Content-Type": LINES}))

    async def add(self, result: BatchResult, _answer: OwnAnswer) -> None:
        async with self._turn:
            await self._response.write(result.json() + b"\n")

    async def finish(self, stats: BatchStats) -> None:
        await self._response.finish(orjson.dumps({"stats": asdict(stats)}) + b"\n")


class WholeWriter:
    """Holds the results; where each prompt failed, the first one's error is the answer."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._results: dict[int, bytes] = {}
        self._size_bytes = 0
        self._failed: dict[int, OwnAnswer] = {}

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    async def add(self, result: BatchResult, answer: OwnAnswer) -> None:
        self._keep(result.index, result.json())
        if result.error:
            self._failed[result.index] = answer

    def _keep(self, index: int, written: bytes) -> None:
        self._results[index] = written
        self._size_bytes += len(written)
        if self._size_bytes > GATHERED_MAX_BYTES:
            raise UpstreamFailed(
                f"the results are larger than {GATHERED_MAX_BYTES} bytes; "
                f"send fewer prompts at once, or to /v1/batch/completions with Accept: {LINES}"
            )

    def _joined(self) -> bytes:
        return b",".join(self._results[index] for index in sorted(self._results))

    async def finish(self, stats: BatchStats) -> None:
        if len(self._failed) == len(self._results):
            await write_whole(self._response, self._failed[0])
            return
        body = b'{"results":[%b],"stats":%b}' % (self._joined(), orjson.dumps(asdict(stats)))
        await write_whole(self._response, OwnAnswer(200, body))


class PlainWriter(WholeWriter):
    """Results without figures, each with `token_ids`, `text` and `num_generated`."""

    async def add(self, result: BatchResult, answer: OwnAnswer) -> None:
        if result.error:
            raise BatchRefused(answer)
        members = {name: getattr(result, name) for name in _PLAIN}
        self._keep(result.index, orjson.dumps(members))

    async def finish(self, _stats: BatchStats) -> None:
        await write_whole(self._response, OwnAnswer(200, b'{"results":[%b]}' % self._joined()))


def writer_for(accept: str, response: ClientResponse) -> ResultWriter:
    return LinesWriter(response) if LINES in accept.lower() else WholeWriter(response)


async def write_whole(response: ClientResponse, answer: OwnAnswer) -> None:
    """Send an answer of our own; raises ConnectionError if the client has left."""
    headers = CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(answer.body))})
    if answer.status < 400:
        await response.begin(answer.status, headers)
        await response.finish(answer.body)
        return
    if answer.retry_after_s is not None:
        headers["Retry-After"] = str(answer.retry_after_s)
    await response.refuse(answer.status, headers, answer.body)


_ENGINE_PATH: Final = "/completion"
# A client waits for its whole batch; each prompt queues between those of other requests.
_QUEUE_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Sender:
    client: str
    names: ModelNames
    model: str
    request_id: str
    is_from_proxy: bool
    owner: CacheOwner


class BatchCompletions:
    """Answers the endpoints; their prompts gather in `queue`."""

    def __init__(self, own: OwnRequests, queue: BatchQueue) -> None:
        self._own = own
        self.queue = queue

    async def serve(
        self,
        request: web.BaseRequest,
        response: ClientResponse,
        share: Share,
        names: ModelNames,
        *,
        read_batch: Callable[[Mapping[str, Any], int], PromptBatch] = read_batch,
        make_writer: Callable[[str, ClientResponse], ResultWriter] = writer_for,
    ) -> None:
        """Answer a request.

        Args:
            request: Its body is read here.
            response: To the client.
            share: The client's share of memory for bodies.
            names: The models that the client may use.
            read_batch: Reads the members of the body; gets the most prompts that may be in it.
            make_writer: Gets the header `Accept`.

        Raises:
            ConnectionError: The client left.
            QueueFull: Too many prompts of the client wait already.
            ProxyError: As `read_body`, `read_batch` and `ModelNames.resolve` do.
        """
        body = await read_body(request, share)
        await check_complexity(body, share)
        members = await share.run(len(body), lambda: members_of(body))
        batch = read_batch(members, self.queue.config.queue_size)
        check(EndpointKind.LLAMA_COMPLETION, batch.shared, share.settings.limits)
        model = named_model(batch.shared) or request.query.get("model")
        sender = _Sender(
            client_of(request),
            names,
            names.resolve(model).model_info.id,
            response.record.request_id,
            HOP in request.headers,
            cache_owner(request, share.settings),
        )
        if model:
            batch = replace(batch, shared={**batch.shared, "model": model})
        writer = make_writer(",".join(request.headers.getall("Accept", ())), response)
        try:
            with self.queue.join(sender.model, sender.client, len(batch.prompts)) as turns:
                await writer.begin()
                run = _Run(self._own, self.queue, batch, sender, writer)
                await run.run(turns)
        except BatchRefused as refused:
            await write_whole(response, refused.answer)
        else:
            await writer.finish(run.stats())


class _Run:
    """One batch."""

    def __init__(
        self,
        own: OwnRequests,
        queue: BatchQueue,
        batch: PromptBatch,
        sender: _Sender,
        writer: ResultWriter,
    ) -> None:
        self._own = own
        self._queue = queue
        self._batch = batch
        self._sender = sender
        self._writer = writer
        self._began_at_s = time.monotonic()
        self._total_tokens = 0
        self._gpu_layers: dict[int, int] = {}  # of the instance that answered, by prompt

    async def run(self, turns: Sequence[Turn]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, turn in enumerate(turns):
                    await turn.formed.wait()
                    self._queue.begin(self._sender.model, turn)
                    waits_no_more = asyncio.Event()
                    group.create_task(self._answer(index, turn, waits_no_more))
                    await waits_no_more.wait()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # as it is: a task group wraps it up

    def stats(self) -> BatchStats:
        return stats_of(
            len(self._batch.prompts),
            self._total_tokens,
            time.monotonic() - self._began_at_s,
            gpu_used=any(self._gpu_layers.values()),
        )

    async def _answer(self, index: int, turn: Turn, waits_no_more: asyncio.Event) -> None:
        try:
            answer = await self._send(index, waits_no_more.set)
        finally:
            waits_no_more.set()
        result = replace(
            result_of(index, answer, _ENGINE_PATH),
            batched=turn.batch.is_batch,
            batch_size=turn.batch.size if turn.batch.is_batch else 1,
            latency_ms=round((time.monotonic() - turn.joined_at_s) * 1000, 3),
        )
        self._total_tokens += result.num_generated
        await self._writer.add(result, answer)

    async def _send(self, index: int, waits_no_more: Callable[[], None]) -> OwnAnswer:
        def on_lease(lease: Lease) -> None:
            self._gpu_layers[index] = lease.upstream.gpu_layers
            waits_no_more()

        sender = self._sender
        return await self._own.answer(
            _ENGINE_PATH,
            self._batch.members(index),
            client=sender.client,
            names=sender.names,
            request_id=f"{sender.request_id}-{index}",
            requests=1 if index else 0,  # the request itself is the first
            limit_wait_s=_QUEUE_TIMEOUT_S,
            queue_timeout_s=_QUEUE_TIMEOUT_S,
            is_from_proxy=sender.is_from_proxy,
            is_let_in=True,
            owner=sender.owner,
            on_lease=on_lease,
        )
