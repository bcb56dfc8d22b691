"""`POST /v1/batch/completions`, `/batch/generate`: many prompts, each a request of priority batch.

Prompts begin in order, and one at a time waits for a slot or for the limits of its key. So a batch
has one place in the queue of its model, and takes slots that interactive requests leave idle. If
the client leaves, all prompts are cancelled.

The response is one object, or a line of JSON for each result in the order of completion, followed
by a line with the statistics. The result of a failed prompt also has `error`, in the usual format.
Names and defaults are those of realizar 0.8.5: `GpuBatchRequest`, `GpuBatchResult`,
`ContinuousBatchResponse` and `GpuBatchStats`; other members are llama-server's and are sent with
each prompt.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.batches.own_requests import OwnAnswer, OwnRequests, refusal
from proxy.common.headers import HOP, JSON
from proxy.errors import BadRequest, LimitExceeded, UpstreamFailed
from proxy.forward.arrays import GATHERED_MAX_BYTES
from proxy.forward.response import ClientResponse
from proxy.http.body import Share, read_members
from proxy.request.limits import check
from proxy.request.models import ModelNames
from proxy.request.request import cache_owner, choices_of, client_of, named_model
from proxy.router.batch_queue import BatchQueue, Turn
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind

# Source: realizar 0.8.5, src/api, `default_max_tokens` and `default_top_k`.
_MAX_TOKENS: Final = 50
_DEFAULTS: Final = MappingProxyType({"temperature": 0.0, "top_k": 50, "stop": []})
# Members that are read here, or set so that the answer has the members of a result.
_OURS: Final = frozenset({"prompts", "prompt", "max_tokens", "response_fields"})
EMPTY_PROMPT: Final = "Prompt cannot be empty"


# The prompts, and the members of llama-server's `/completion` that they share.
PromptBatch = tuple[Sequence[str], Mapping[str, Any]]


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
    return prompts, {**_DEFAULTS, **shared, "return_tokens": True}


def prompts_of(members: Mapping[str, Any], max_prompts: int) -> list[str]:
    """Return the prompts of a body; raises as `read_batch` does."""
    prompts = strings_of(
        members, "prompts", max_prompts, "; or raise queue_size under [proxy.batch]"
    )
    if not all(prompts):
        raise BadRequest(EMPTY_PROMPT)
    return prompts


def strings_of(members: Mapping[str, Any], name: str, limit: int, hint: str = "") -> list[str]:
    """Return a list of 1 to `limit` strings; raises BadRequest, LimitExceeded."""
    given = members.get(name)
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise BadRequest(f"{name} must be a list of strings")
    if not given:
        raise BadRequest(f"{name.capitalize()} array cannot be empty")
    if len(given) > limit:
        raise LimitExceeded(
            f"{name} has {len(given)} entries, more than {limit}; send fewer at once{hint}"
        )
    return given


def whole_number(members: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """Return a number of `least` or more; raises BadRequest."""
    value = members.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadRequest(f"{name} must be a whole number, {least} or more")
    return value


def _check_numbers(members: Mapping[str, Any]) -> None:
    # An engine generates one token even if the limit is 0.
    whole_number(members, "max_tokens", _MAX_TOKENS)
    whole_number(members, "top_k", 0, least=0)
    value = members.get("temperature", 0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadRequest("temperature must be a number")
    stop = members.get("stop", [])
    is_list = isinstance(stop, list) and all(isinstance(text, str) for text in stop)
    if not isinstance(stop, str) and not is_list:
        raise BadRequest("stop must be a list of strings")


def generated_completion(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return one completion; `token_ids` are the generated tokens, without the prompt's."""
    return {
        "token_ids": answer["tokens"],
        "text": answer["content"],
        "num_generated": len(answer["tokens"]),
    }


_NOTHING: Final = MappingProxyType({"tokens": (), "content": ""})


def result_of(index: int, answer: OwnAnswer, path: str) -> dict[str, Any]:
    """Return the result of the prompt with this index; `path` is the endpoint that answered.

    If there is no answer, the member `error` has the reason.
    """
    try:
        body = orjson.loads(answer.body)
        if answer.status >= 400:
            return {"index": index, **generated_completion(_NOTHING), "error": body["error"]}
        return {"index": index, **generated_completion(body)}
    except (ValueError, LookupError, TypeError) as error:
        failure = UpstreamFailed(f"the answer to prompt {index} has another format: {error!r}")
        return result_of(index, refusal(path, failure), path)


LINES: Final = "application/x-ndjson"
# Source: realizar 0.8.5, `GenerateResponse`.
_PLAIN: Final = ("token_ids", "text", "num_generated")


class BatchRefused(Exception):
    """One prompt failed, and its error is the response."""

    def __init__(self, answer: OwnAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


Form = Literal["lines", "object", "plain"]


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
# A client waits for its whole batch, whose prompts queue among other requests.
_QUEUE_TIMEOUT_S: Final = 3600.0


class BatchCompletions:
    """Answers the endpoints; their prompts wait in `queue`."""

    def __init__(self, own: OwnRequests, queue: BatchQueue) -> None:
        self.own = own
        self.queue = queue

    async def serve(
        self,
        request: web.BaseRequest,
        response: ClientResponse,
        share: Share,
        names: ModelNames,
        *,
        read_batch: Callable[[Mapping[str, Any], int], PromptBatch] = read_batch,
        is_plain: bool = False,
    ) -> None:
        """Answer a request.

        Args:
            read_batch: Reads the members of the body; its second argument is the limit of prompts.
            is_plain: Whether results have only the completion, and the first failure is the answer.

        Raises:
            ConnectionError: The client left.
            QueueFull: Too many prompts of the client already wait.
            ProxyError: As `read_body`, `read_batch` and `ModelNames.resolve` do.
        """
        members = await read_members(request, share)
        prompts, shared = read_batch(members, self.queue.config.queue_size)
        check(EndpointKind.LLAMA_COMPLETION, shared, share.settings.limits)
        model, client = named_model(shared) or request.query.get("model"), client_of(request)
        model_id = names.resolve(model).model_info.id
        if model:
            shared = {**shared, "model": model}
        send = functools.partial(
            self.own.answer,
            _ENGINE_PATH,
            client=client,
            names=names,
            limit_wait_s=_QUEUE_TIMEOUT_S,
            queue_timeout_s=_QUEUE_TIMEOUT_S,
            is_from_proxy=HOP in request.headers,
            is_let_in=True,
            owner=cache_owner(request, share.settings),
        )
        has_lines = LINES in ",".join(request.headers.getall("Accept", ())).lower()
        form: Form = "plain" if is_plain else "lines" if has_lines else "object"
        run = _Run((prompts, shared), response, send, form)
        try:
            with self.queue.join(model_id, client, len(prompts)) as turns:
                await run.run(turns, functools.partial(self.queue.begin, model_id))
        except BatchRefused as refused:
            await write_whole(response, refused.answer)
        else:
            await run.finish()


class _Run:
    """Sends the prompts of one batch with `send`, and writes their results in this form.

    Results are sent in lines as they arrive, or held until the end.
    """

    def __init__(
        self,
        batch: PromptBatch,
        response: ClientResponse,
        send: Callable[..., Awaitable[OwnAnswer]],
        form: Form,
    ) -> None:
        self._prompts, self._shared = batch
        self._response = response
        self._send = send
        self._form = form
        self._began_at_s = time.monotonic()
        self._total_tokens = 0
        self._gpu_layers: dict[int, int] = {}  # of the answering instance, by prompt
        self._writing = asyncio.Lock()
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._failed: dict[int, OwnAnswer] = {}

    async def run(self, turns: Sequence[Turn], begin: Callable[[Turn], None]) -> None:
        if self._form == "lines":
            await self._response.begin(200, CIMultiDict({"Content-Type": LINES}))
        try:
            async with asyncio.TaskGroup() as group:
                for index, turn in enumerate(turns):
                    await turn.formed.wait()
                    begin(turn)
                    has_lease = asyncio.Event()
                    group.create_task(self._answer(index, turn, has_lease))
                    await has_lease.wait()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # without the task group around it

    async def finish(self) -> None:
        """Send the remaining results; if every prompt failed, the first error is the response."""
        stats = orjson.dumps(self._stats())
        if self._form == "lines":
            await self._response.finish(b'{"stats":%b}\n' % stats)
        elif len(self._failed) == len(self._prompts):
            await write_whole(self._response, self._failed[0])
        else:
            results = b",".join(self._held[index] for index in sorted(self._held))
            end = b"" if self._form == "plain" else b',"stats":%b' % stats
            body = b'{"results":[%b]%b}' % (results, end)
            await write_whole(self._response, OwnAnswer(200, body))

    def _stats(self) -> dict[str, object]:
        """Return the statistics of the batch.

        `gpu_used` says whether an engine that answered has layers on a GPU; engines of other
        machines count as without.
        """
        duration_s, tokens = time.monotonic() - self._began_at_s, self._total_tokens
        return {
            "batch_size": len(self._prompts),
            "gpu_used": any(self._gpu_layers.values()),
            "total_tokens": tokens,
            "processing_time_ms": round(duration_s * 1000, 3),
            "throughput_tps": round(tokens / duration_s, 3) if duration_s > 0 else 0.0,
        }

    async def _answer(self, index: int, turn: Turn, has_lease: asyncio.Event) -> None:
        def on_lease(lease: Lease) -> None:
            self._gpu_layers[index] = lease.upstream.gpu_layers
            has_lease.set()

        try:
            answer = await self._send(
                {**self._shared, "prompt": self._prompts[index]},
                request_id=f"{self._response.record.request_id}-{index}",
                requests=1 if index else 0,  # the request itself counts as the first
                on_lease=on_lease,
            )
        finally:
            has_lease.set()
        result = {
            **result_of(index, answer, _ENGINE_PATH),
            "batched": turn.batch_size is not None,  # whether it began together with others
            "batch_size": turn.batch_size or 1,  # number of prompts that began together
            # time from joining the queue to the complete answer
            "latency_ms": round((time.monotonic() - turn.joined_at_s) * 1000, 3),
        }
        self._total_tokens += result["num_generated"]
        await self._write(index, result, answer)

    async def _write(self, index: int, result: Mapping[str, Any], answer: OwnAnswer) -> None:
        if "error" in result:
            if self._form == "plain":
                raise BatchRefused(answer)
            self._failed[index] = answer
        shown = {name: result[name] for name in _PLAIN} if self._form == "plain" else result
        encoded = orjson.dumps(shown)
        if self._form == "lines":
            async with self._writing:
                await self._response.write(encoded + b"\n")
            return
        self._held[index] = encoded
        self._held_bytes += len(encoded)
        if self._held_bytes > GATHERED_MAX_BYTES:
            raise UpstreamFailed(
                f"the results are larger than {GATHERED_MAX_BYTES} bytes; "
                f"send fewer prompts at once, or to /v1/batch/completions with Accept: {LINES}"
            )
