"""An engine's answer, piece by piece, as Ollama's API tells it. Pure.

A piece is one of a chat completion or of llama-server's own completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

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
    message = {"role": "assistant", "content": delta.content, **_more(delta)}
    return {"message": message, **_logprobs(delta)}


def as_response(delta: Delta) -> dict[str, Any]:
    """As `/api/generate` has it."""
    return {"response": delta.content, **_more(delta), **_logprobs(delta)}


def _more(delta: Delta) -> dict[str, Any]:
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

    def whole(self, index: int) -> dict[str, Any]:
        """Return the call; without arguments where it was cut."""
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
        calls = [call.whole(index) for index, call in sorted(self._calls.items())]
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
