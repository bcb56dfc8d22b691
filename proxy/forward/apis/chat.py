"""OpenAI's chat and text completions out of the pieces of a stream. Pure.

An engine sends the last piece of a choice and its timings one after the other; the whole response
has those of choice 0. Source: llama-server, build 10434, both responses at temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.errors import Unfinished
from proxy.upstream.sse import InvalidEvent

# What the whole answer takes from the last piece of choice 0, besides members unknown to us.
_OURS: Final = frozenset({"choices", "object", "prompt_progress", "usage", "timings"})
_CHOICES_MAX: Final = 1024


@dataclass(slots=True)
class _Call:
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = delta.get("id") or self.id
        self.type = delta.get("type") or self.type
        self.name = function.get("name") or self.name
        self.arguments.append(function.get("arguments") or "")

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"type": self.type, "function": function, "id": self.id}


@dataclass(slots=True)
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    finish_reason: str | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    packed: int = 0  # texts that are part of the first one

    def add(self, piece: Mapping[str, Any]) -> None:
        delta = piece.get("delta") or {}
        if text := delta.get("content") or piece.get("text"):
            self.content.append(text)
        if text := delta.get("reasoning_content"):
            self.reasoning.append(text)
        for call in delta.get("tool_calls") or ():
            self.calls.setdefault(call["index"], _Call()).add(call)
        self.finish_reason = piece.get("finish_reason") or self.finish_reason

    @property
    def is_blank(self) -> bool:
        return not (self.calls or any(self.content) or any(self.reasoning))

    def pack(self) -> None:
        arguments = [call.arguments for call in self.calls.values()]
        self.packed += max(0, len(self.content) - 1)
        for texts in filter(None, (self.content, self.reasoning, *arguments)):
            texts[:] = ["".join(texts)]

    def unfinished(self) -> Unfinished | None:
        if self.finish_reason or self.calls or self.reasoning:
            return None
        tokens = self.packed + len(self.content)
        return Unfinished("".join(self.content), tokens, self.last.get("id"))

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [self.calls[at].whole() for at in sorted(self.calls)]
        return message


class ChatAssembler:
    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._choices: dict[int, _Choice] = {}
        self._latest = _Choice()
        self._body: Mapping[str, Any] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every choice that began has ended."""
        choices = self._choices.values()
        return bool(choices) and all(choice.finish_reason for choice in choices)

    @property
    def is_blank(self) -> bool:
        """Whether any choice has nothing to show."""
        return any(choice.is_blank for choice in self._choices.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        for part in piece["choices"]:
            if (choice := self._choices.get(part["index"])) is None:
                choice = self._choices[part["index"]] = _Choice()
            choice.add(part)
            choice.last = piece
            self._latest = choice
        if len(self._choices) > _CHOICES_MAX:
            raise InvalidEvent(f"it has more than {_CHOICES_MAX} choices")
        for name in ("usage", "timings"):
            if name in piece:
                self._latest.figures[name] = piece[name]

    def unfinished(self) -> Unfinished | None:
        """Return the text of a stream that broke off; None if it is more than plain text."""
        is_plain = self._is_chat and len(self._choices) <= 1
        return self._first().unfinished() if is_plain else None

    def pack(self) -> None:
        for choice in self._choices.values():
            choice.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def message(self) -> Mapping[str, Any] | None:
        """The message of the first choice, as a client repeats it in its next request."""
        if self._body:
            message: Mapping[str, Any] = self._body["choices"][0]["message"]
            return message
        return self._first().message() if self._is_chat and self.is_complete else None

    def timings(self) -> Mapping[str, Any] | None:
        return self._body.get("timings") or self._first().figures.get("timings")

    def other_timings(self) -> Iterable[object]:
        others = (choice for index, choice in self._choices.items() if index)
        return [choice.figures.get("timings") for choice in others]

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        first = self._first()
        shared = {name: value for name, value in first.last.items() if name not in _OURS}
        return {
            "choices": [self._part(index) for index in sorted(self._choices)],
            **shared,
            "object": "chat.completion" if self._is_chat else "text_completion",
            **first.figures,
        }

    def _first(self) -> _Choice:
        return self._choices.get(0) or _Choice()

    def _part(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        finished = {"index": index, "finish_reason": choice.finish_reason}
        if self._is_chat:
            return {**finished, "message": choice.message()}
        return {**finished, "text": "".join(choice.content), "logprobs": None}
