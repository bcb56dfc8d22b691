"""The response to a request of Ollama's API: JSON in lines, or one line.

A piece of an engine's answer is one of a chat completion or of llama-server's own completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.apis.ollama_request import EngineRequest
from proxy.forward.response import ClientResponse, RequestWriter
from proxy.forward.translation import Events, TranslatedWriter
from proxy.observe.record import AccessRecord
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.sse import DONE, InvalidEvent, Splitter, data_of, members_of

_NS: Final = 1_000_000  # in a millisecond


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece adds."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Any] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.thinking or self.calls or self.logprobs)


Shape = Callable[[Delta], dict[str, Any]]


def as_message(delta: Delta) -> dict[str, Any]:
    """As `/api/chat` has it."""
    message = {"role": "assistant", "content": delta.content, **_delta_message(delta)}
    return {"message": message, **_logprobs(delta)}


def as_response(delta: Delta) -> dict[str, Any]:
    """As `/api/generate` has it."""
    return {"response": delta.content, **_delta_message(delta), **_logprobs(delta)}


def _delta_message(delta: Delta) -> dict[str, Any]:
    thinking = {"thinking": delta.thinking} if delta.thinking else {}
    return {**thinking, **({"tool_calls": list(delta.calls)} if delta.calls else {})}


def _logprobs(delta: Delta) -> dict[str, Any]:
    return {"logprobs": list(delta.logprobs)} if delta.logprobs else {}


@dataclass(slots=True)
class _Call:
    name: str = ""
    id: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, piece: Mapping[str, Any]) -> None:
        function = piece.get("function") or {}
        self.id = piece.get("id") or self.id
        self.name = function.get("name") or self.name
        self.arguments.append(function.get("arguments") or "")

    def to_json(self, index: int) -> dict[str, Any]:
        """Return the call; its arguments are empty if it was cut."""
        try:
            arguments = orjson.loads("".join(self.arguments) or "{}")
        except orjson.JSONDecodeError:
            arguments = {}
        function = {"index": index, "name": self.name, "arguments": arguments}
        return {"id": self.id, "function": function}


class Answer:
    """One answer.

    Attributes:
        is_over: Whether a piece of llama-server's own completion said that it is the last.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._reason = "stop"
        self._calls: dict[int, _Call] = {}
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Take a piece; raises what reading another format raises."""
        self._usage = piece.get("usage") or self._usage
        self._timings = piece.get("timings") or self._timings
        return self._of_chat(piece) if "choices" in piece else self._of_completion(piece)

    def end(self) -> tuple[Delta, dict[str, Any]]:
        """Return the calls, which are complete now, and the members of the last line."""
        calls = [call.to_json(index) for index, call in sorted(self._calls.items())]
        return Delta(calls=calls), {"done": True, "done_reason": self._reason, **self._figures()}

    def _of_chat(self, piece: Mapping[str, Any]) -> Delta:
        for choice in piece["choices"]:
            if choice.get("finish_reason") == "length":
                self._reason = "length"
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or ():
                self._calls.setdefault(call["index"], _Call()).add(call)
            logprobs = (choice.get("logprobs") or {}).get("content") or ()
            texts = delta.get("content") or "", delta.get("reasoning_content") or ""
            return Delta(*texts, logprobs=logprobs)
        return Delta()

    def _of_completion(self, piece: Mapping[str, Any]) -> Delta:
        if piece.get("stop") is True:
            self.is_over = True
            self._reason = "length" if piece.get("stop_type") == "limit" else "stop"
            self._usage = {
                "prompt_tokens": piece.get("tokens_evaluated"),
                "completion_tokens": piece.get("tokens_predicted"),
            }
        return Delta(piece.get("content") or "")

    def _figures(self) -> dict[str, int]:
        usage, timings = self._usage, self._timings
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            prompt = timings.get("cache_n", 0) + timings.get("prompt_n", 0)
        decoded = usage.get("completion_tokens")
        return {
            "prompt_eval_count": prompt,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0) * _NS),
            "eval_count": timings.get("predicted_n", 0) if decoded is None else decoded,
            "eval_duration": int(timings.get("predicted_ms", 0) * _NS),
        }


def whole_piece(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole completion as its only piece."""
    if "choices" not in body:
        return {**body, "stop": True}
    (choice, *_) = body["choices"]
    message = choice["message"]
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
    return {**body, "choices": [{**choice, "delta": {**message, "tool_calls": calls}}]}


Durations = Callable[[], Mapping[str, int]]


class AnswerLines:
    """One answer; `is_over` after its last line.

    Args:
        model: The name that the client gave.
        shape: How the endpoint writes what a piece adds.
        durations: Returns the members that say how long the request has taken.
    """

    def __init__(self, model: str, shape: Shape, durations: Durations) -> None:
        self.is_over = False
        self._model = model
        self._shape = shape
        self._durations = durations
        self._answer = Answer()
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes, return the client's; raises InvalidEvent."""
        return b"".join(
            [line for event in self._splitter.feed(chunk) for line in self._lines(event)]
        )

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        """Return a whole answer; raises what reading another format raises."""
        delta = self._answer.add(whole_piece(body))
        called, last = self._answer.end()
        return self._written(replace(delta, calls=called.calls), self._durations(), last)

    def _lines(self, event: bytes) -> Iterator[bytes]:
        if self.is_over:
            return
        if data_of(event) == DONE:
            yield from self._end()
            return
        if (piece := members_of(event)) is None:  # a comment
            return
        if "error" in piece:
            self.is_over = True
            yield failure(piece)
            return
        try:
            delta = self._answer.add(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of an answer: {error!r}") from error
        if not delta.is_empty:
            yield self._written(delta, {"done": False})
        if self._answer.is_over:
            yield from self._end()

    def _end(self) -> Iterator[bytes]:
        called, last = self._answer.end()
        if called.calls:
            yield self._written(called, {"done": False})
        yield self._written(Delta(), self._durations(), last)
        self.is_over = True

    def _written(self, delta: Delta, *members: Mapping[str, Any]) -> bytes:
        line = {**header(self._model), **self._shape(delta)}
        for more in members:
            line.update(more)
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def header(model: str) -> dict[str, str]:
    """Return the members that every line begins with."""
    now = datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def failure(body: Mapping[str, Any]) -> bytes:
    """Return an error of an engine, or of ours in OpenAI's format, as Ollama writes one."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return orjson.dumps({"error": str(message)}, option=orjson.OPT_APPEND_NEWLINE)


def vectors_of(body: Mapping[str, Any], dimensions: int | None) -> list[Sequence[float]]:
    """Return the vectors in the order of their texts; raises what another format raises."""
    ordered = sorted(body["data"], key=lambda item: int(item["index"]))
    return [_cut(item["embedding"], dimensions) for item in ordered]


def prompt_tokens(body: Mapping[str, Any]) -> int:
    return int((body.get("usage") or {}).get("prompt_tokens", 0))


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first of its values, of length 1 again; unchanged where it has no more."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


LINES: Final = "application/x-ndjson"
# Names of what a request gave and nothing was made of.
IGNORED: Final = "X-Corral-Ignored"
_LINE_END: Final = b"\n"
_IGNORED_MAX_CHARACTERS: Final = 512


class OllamaResponse(ClientResponse):
    """A response to one of Ollama's endpoints; `take` says to what.

    Attributes:
        model: The name that the client gave.
    """

    stream_type: ClassVar[str] = LINES
    piece_end: ClassVar[bytes] = _LINE_END

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        super().__init__(request, record)
        self.model = ""
        self._asked: EngineRequest | None = None
        self._began_at_s = time.monotonic()
        self._queued_s = 0.0

    def take(self, model: str, asked: EngineRequest | None) -> None:
        """Note what the request is for; None: it loads the model."""
        self.model, self._asked = model, asked

    def empty(self) -> dict[str, Any]:
        """Return the members of a line without text."""
        raise NotImplementedError

    def writer(self) -> RequestWriter:
        return _Writer(self)

    def lines(self) -> Events:
        raise NotImplementedError

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        """Translate a whole answer; raises as reading another format does."""
        raise NotImplementedError

    def durations(self) -> Mapping[str, int]:
        total_s = time.monotonic() - self._began_at_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(self._queued_s * 1e9)}

    def note_lease(self, lease: Lease) -> None:
        super().note_lease(lease)
        self._queued_s = lease.queued_s
        if self._asked and self._asked.ignored:
            names = ", ".join(ascii(name)[1:-1] for name in self._asked.ignored)
            more = {IGNORED: names[:_IGNORED_MAX_CHARACTERS]}
            self.extra_headers = {**self.extra_headers, **more}

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        body = failure(orjson.loads(body))
        headers["Content-Length"] = str(len(body))
        await super().refuse(status, headers, body)

    def ping(self, _kind: EndpointKind) -> bytes:
        line = {**header(self.model), **self.empty(), "done": False}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def error_piece(self, body: bytes) -> bytes:
        return failure(orjson.loads(body))


class _TextResponse(OllamaResponse):
    shape: ClassVar[Shape]

    def empty(self) -> dict[str, Any]:
        return type(self).shape(Delta())

    def lines(self) -> AnswerLines:
        return AnswerLines(self.model, type(self).shape, self.durations)

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        return self.lines().translate_whole(body)


class ChatResponse(_TextResponse):
    shape = as_message


class GenerateResponse(_TextResponse):
    shape = as_response


class EmbedResponse(OllamaResponse):
    def empty(self) -> dict[str, Any]:
        return {"embeddings": []}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        vectors = vectors_of(body, self._asked.dimensions if self._asked else None)
        counted = {**self.durations(), "prompt_eval_count": prompt_tokens(body)}
        return orjson.dumps({"model": self.model, "embeddings": vectors, **counted})


class EmbeddingsResponse(OllamaResponse):
    def empty(self) -> dict[str, Any]:
        return {"embedding": []}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        (vector,) = vectors_of(body, None)
        return orjson.dumps({"embedding": vector})


class _Writer(TranslatedWriter):
    """Passes one instance's answer on."""

    def __init__(self, response: OllamaResponse) -> None:
        super().__init__(response)
        self._response = response

    def new_events(self) -> Events:
        return self._response.lines()

    def translate_whole(self, body: bytes) -> bytes:
        return self._response.translate_whole(orjson.loads(body))

    async def _begin_stream(self, status: int, headers: CIMultiDict[str]) -> None:
        headers["Content-Type"] = LINES
        await super()._begin_stream(status, headers)
