"""Translates an engine's answer to Ollama's API: JSON in lines, or one line.

The answer is a chat completion or llama-server's own completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, Literal

import orjson
from multidict import CIMultiDict

from proxy.apis.ollama_request import EngineRequest
from proxy.common.headers import is_event_stream
from proxy.forward.assemblers import ToolCall, chat_piece
from proxy.forward.response import EventTransform
from proxy.http.api_formats import LINES, ollama_error
from proxy.router.lease import Lease
from proxy.upstream.http1 import DONE, data_of, members_of

_NS: Final = 1_000_000  # in a millisecond


# What a piece adds: those of `content`, `thinking`, `tool_calls` and `logprobs` that are not empty.
Delta = dict[str, Any]
Shape = Callable[[Delta], dict[str, Any]]


def as_message(delta: Delta) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", **delta}
    logprobs = message.pop("logprobs", None)
    return {"message": message, "logprobs": logprobs} if logprobs else {"message": message}


def as_response(delta: Delta) -> dict[str, Any]:
    others = {name: value for name, value in delta.items() if name != "content"}
    return {"response": delta.get("content", ""), **others}


def _call_json(call: ToolCall, index: int) -> dict[str, Any]:
    """Return a call; its arguments are empty if it was cut."""
    try:
        arguments = orjson.loads(call.arguments or b"{}")
    except orjson.JSONDecodeError:
        arguments = {}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def header(model: str) -> dict[str, Any]:
    now = datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def vectors_of(body: Mapping[str, Any], dimensions: int | None) -> list[Sequence[float]]:
    """Return the vectors in the order of their texts.

    Raises ValueError, LookupError, TypeError: the body has another format.
    """
    ordered = sorted(body["data"], key=lambda item: int(item["index"]))
    return [_cut(item["embedding"], dimensions) for item in ordered]


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


class OllamaAnswer(EventTransform):
    """Translates an answer for an endpoint; `empty` has the members of an empty answer.

    `take` sets the request and the client's `model`.
    """

    def __init__(self, empty: Mapping[str, Any]) -> None:
        super().__init__()
        self.empty = empty
        self.model = ""
        self._asked: EngineRequest | None = None
        self._began_at_s = time.monotonic()
        self._queued_s = 0.0

    def take(self, model: str, asked: EngineRequest | None) -> None:
        """Note the model and the engine's request; None if the request only loads the model."""
        self.model, self._asked = model, asked

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        """Translate a whole answer; raises as `whole` does."""
        raise NotImplementedError

    def durations(self) -> Mapping[str, int]:
        total_s = time.monotonic() - self._began_at_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(self._queued_s * 1e9)}

    def ping(self) -> bytes:
        return self._encode_line(self.empty, {"done": False})

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

    def _encode_line(self, *members: Mapping[str, Any]) -> bytes:
        line = header(self.model)
        for more in members:
            line.update(more)
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


class AnswerLines(OllamaAnswer):
    """Writes the lines of one answer; `is_over` is True after the last line.

    Args:
        shape: Returns the endpoint's members for a delta.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape({}))
        self.is_over = False
        self._shape = shape
        self._reason = "stop"
        self._calls: dict[int, ToolCall] = {}
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        delta = self._add(chat_piece(body) if "choices" in body else {**body, "stop": True})
        return self._encode_line(self._shape(delta | self._called()), self._last_members())

    def event(self, event: bytes) -> bytes:
        if self.is_over:
            return b""
        if data_of(event) == DONE:
            return self._end()
        if (piece := members_of(event)) is None:  # a comment
            return b""
        if "error" in piece:
            self.is_over = True
            error = piece["error"]
            return ollama_error(error if isinstance(error, dict) else {"message": error})
        delta = self._add(piece)
        line = self._encode_line(self._shape(delta), {"done": False}) if delta else b""
        return line + self._end() if piece.get("stop") is True else line

    def _add(self, piece: Mapping[str, Any]) -> Delta:
        """Take a piece; raises LookupError, TypeError or AttributeError for another format."""
        self._usage = piece.get("usage") or self._usage
        self._timings = piece.get("timings") or self._timings
        if piece.get("stop") is True:
            self._reason = "length" if piece.get("stop_type") == "limit" else "stop"
            self._usage = {
                "prompt_tokens": piece.get("tokens_evaluated"),
                "completion_tokens": piece.get("tokens_predicted"),
            }
        if "choices" not in piece:
            return {"content": text} if (text := piece.get("content")) else {}
        for choice in piece["choices"]:
            if choice.get("finish_reason") == "length":
                self._reason = "length"
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or ():
                self._calls.setdefault(call["index"], ToolCall()).add(call)
            added = {
                "content": delta.get("content"),
                "thinking": delta.get("reasoning_content"),
                "logprobs": (choice.get("logprobs") or {}).get("content"),
            }
            return {name: value for name, value in added.items() if value}
        return {}

    def _called(self) -> Delta:
        calls = [_call_json(call, index) for index, call in sorted(self._calls.items())]
        return {"tool_calls": calls} if calls else {}

    def _end(self) -> bytes:
        self.is_over = True
        called = self._called()
        line = self._encode_line(self._shape(called), {"done": False}) if called else b""
        return line + self._encode_line(self.empty, self._last_members())

    def _last_members(self) -> dict[str, Any]:
        usage, timings = self._usage, self._timings
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            prompt = timings.get("cache_n", 0) + timings.get("prompt_n", 0)
        decoded = usage.get("completion_tokens")
        return {
            **self.durations(),
            "done": True,
            "done_reason": self._reason,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0) * _NS),
            "eval_count": timings.get("predicted_n", 0) if decoded is None else decoded,
            "eval_duration": int(timings.get("predicted_ms", 0) * _NS),
        }


class VectorAnswer(OllamaAnswer):
    """Translates vectors for `/api/embed`, and the single one of the older `/api/embeddings`."""

    def __init__(self, member: Literal["embeddings", "embedding"]) -> None:
        super().__init__({member: []})

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        vectors = vectors_of(body, self._asked.dimensions if self._asked else None)
        if "embedding" in self.empty:
            (vector,) = vectors
            return orjson.dumps({"embedding": vector})
        tokens = int((body.get("usage") or {}).get("prompt_tokens", 0))
        counted = {**self.durations(), "prompt_eval_count": tokens}
        return orjson.dumps({"model": self.model, "embeddings": vectors, **counted})
