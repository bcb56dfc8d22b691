"""Translates an engine's answer to Ollama's API: JSON in lines, or one line.

The answer is a chat completion or llama-server's own completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.apis.ollama_request import EngineRequest
from proxy.common.headers import is_event_stream
from proxy.forward.assemblers import ToolCall
from proxy.forward.response import StreamTransform
from proxy.http.api_formats import LINES, ollama_error
from proxy.router.lease import Lease
from proxy.upstream.http1 import DONE, InvalidEvent, Splitter, data_of, members_of

_NS: Final = 1_000_000  # in a millisecond


@dataclass(frozen=True, slots=True)
class Delta:
    content: str = ""
    thinking: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Any] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.thinking or self.calls or self.logprobs)


Shape = Callable[[Delta], dict[str, Any]]


def as_message(delta: Delta) -> dict[str, Any]:
    message = {"role": "assistant", "content": delta.content, **_delta_message(delta)}
    return {"message": message, **_logprobs(delta)}


def as_response(delta: Delta) -> dict[str, Any]:
    return {"response": delta.content, **_delta_message(delta), **_logprobs(delta)}


def _delta_message(delta: Delta) -> dict[str, Any]:
    thinking = {"thinking": delta.thinking} if delta.thinking else {}
    return {**thinking, **({"tool_calls": list(delta.calls)} if delta.calls else {})}


def _logprobs(delta: Delta) -> dict[str, Any]:
    return {"logprobs": list(delta.logprobs)} if delta.logprobs else {}


def _call_json(call: ToolCall, index: int) -> dict[str, Any]:
    """Return a call; its arguments are empty if it was cut."""
    try:
        arguments = orjson.loads("".join(call.arguments) or "{}")
    except orjson.JSONDecodeError:
        arguments = {}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


class Answer:
    """Collects one answer; `is_over` once llama-server's own completion has ended."""

    def __init__(self) -> None:
        self.is_over = False
        self._reason = "stop"
        self._calls: dict[int, ToolCall] = {}
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Take a piece; raises LookupError, TypeError or AttributeError for another format."""
        self._usage = piece.get("usage") or self._usage
        self._timings = piece.get("timings") or self._timings
        return self._chat_delta(piece) if "choices" in piece else self._completion_delta(piece)

    def end(self) -> tuple[Delta, dict[str, Any]]:
        calls = [_call_json(call, index) for index, call in sorted(self._calls.items())]
        return Delta(calls=calls), {"done": True, "done_reason": self._reason, **self._figures()}

    def _chat_delta(self, piece: Mapping[str, Any]) -> Delta:
        for choice in piece["choices"]:
            if choice.get("finish_reason") == "length":
                self._reason = "length"
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or ():
                self._calls.setdefault(call["index"], ToolCall()).add(call)
            logprobs = (choice.get("logprobs") or {}).get("content") or ()
            texts = delta.get("content") or "", delta.get("reasoning_content") or ""
            return Delta(*texts, logprobs=logprobs)
        return Delta()

    def _completion_delta(self, piece: Mapping[str, Any]) -> Delta:
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
    if "choices" not in body:
        return {**body, "stop": True}
    (choice, *_) = body["choices"]
    message = choice["message"]
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
    return {**body, "choices": [{**choice, "delta": {**message, "tool_calls": calls}}]}


def header(model: str) -> dict[str, str]:
    now = datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def failure(body: Mapping[str, Any]) -> bytes:
    """Return an engine's error in Ollama's format."""
    error = body.get("error")
    return ollama_error(error if isinstance(error, dict) else {"message": error})


def vectors_of(body: Mapping[str, Any], dimensions: int | None) -> list[Sequence[float]]:
    """Return the vectors in the order of their texts.

    Raises ValueError, LookupError, TypeError: the body has another format.
    """
    ordered = sorted(body["data"], key=lambda item: int(item["index"]))
    return [_cut(item["embedding"], dimensions) for item in ordered]


def prompt_tokens(body: Mapping[str, Any]) -> int:
    return int((body.get("usage") or {}).get("prompt_tokens", 0))


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first values of a vector, normalised to length 1; unchanged if it has no more."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


# Names of members and options of the request that have no effect.
IGNORED: Final = "X-Corral-Ignored"
_IGNORED_MAX_CHARACTERS: Final = 512


class OllamaAnswer(StreamTransform):
    """Translates an answer for an endpoint; `take` sets the request and the client's `model`."""

    def __init__(self) -> None:
        self.model = ""
        self._asked: EngineRequest | None = None
        self._began_at_s = time.monotonic()
        self._queued_s = 0.0

    def take(self, model: str, asked: EngineRequest | None) -> None:
        """Note the model and the engine's request; None if the request only loads the model."""
        self.model, self._asked = model, asked

    def empty(self) -> dict[str, Any]:
        raise NotImplementedError

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        """Translate a whole answer; raises as `whole` does."""
        raise NotImplementedError

    def durations(self) -> Mapping[str, int]:
        total_s = time.monotonic() - self._began_at_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(self._queued_s * 1e9)}

    def ping(self) -> bytes:
        line = {**header(self.model), **self.empty(), "done": False}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def note_lease(self, lease: Lease) -> None:
        self._queued_s = lease.queued_s

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002 (of any status)
        if is_event_stream(headers):
            headers["Content-Type"] = LINES
        if self._asked and self._asked.ignored:
            names = ", ".join(ascii(name)[1:-1] for name in self._asked.ignored)
            headers[IGNORED] = names[:_IGNORED_MAX_CHARACTERS]

    def whole(self, status: int, body: bytes) -> bytes:
        return self.translate_whole(orjson.loads(body)) if status == HTTPStatus.OK else body

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:
        self.begin(status, headers)
        return body


class AnswerLines(OllamaAnswer):
    """Writes the lines of one answer; `is_over` is True after the last line.

    Args:
        shape: Returns the endpoint's members for a delta.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_over = False
        self._shape = shape
        self._answer = Answer()
        self._splitter = Splitter()

    def empty(self) -> dict[str, Any]:
        return self._shape(Delta())

    def feed(self, chunk: bytes) -> bytes:
        """Translate the engine's next bytes; raises InvalidEvent."""
        return b"".join(
            [line for event in self._splitter.feed(chunk) for line in self._lines(event)]
        )

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        delta = self._answer.add(whole_piece(body))
        called, last = self._answer.end()
        return self._encode_line(replace(delta, calls=called.calls), self.durations(), last)

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
            yield self._encode_line(delta, {"done": False})
        if self._answer.is_over:
            yield from self._end()

    def _end(self) -> Iterator[bytes]:
        called, last = self._answer.end()
        if called.calls:
            yield self._encode_line(called, {"done": False})
        yield self._encode_line(Delta(), self.durations(), last)
        self.is_over = True

    def _encode_line(self, delta: Delta, *members: Mapping[str, Any]) -> bytes:
        line = {**header(self.model), **self._shape(delta)}
        for more in members:
            line.update(more)
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


class EmbedAnswer(OllamaAnswer):
    def empty(self) -> dict[str, Any]:
        return {"embeddings": []}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        vectors = vectors_of(body, self._asked.dimensions if self._asked else None)
        counted = {**self.durations(), "prompt_eval_count": prompt_tokens(body)}
        return orjson.dumps({"model": self.model, "embeddings": vectors, **counted})


class EmbeddingsAnswer(OllamaAnswer):
    def empty(self) -> dict[str, Any]:
        return {"embedding": []}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        (vector,) = vectors_of(body, None)
        return orjson.dumps({"embedding": vector})
