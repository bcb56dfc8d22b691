"""Anthropic's message out of the pieces of a stream. Pure.

Source: llama-server, build 10434, both responses at temperature 0; it reports tokens, no `timings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from proxy.forward.apis.native import token_timings
from proxy.upstream.sse import InvalidEvent

# What each kind of piece adds to its block, and where; a call's input comes as JSON in parts.
_ADDS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


@dataclass(slots=True)
class _Block:
    began: Mapping[str, Any]
    parts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, delta: Mapping[str, Any]) -> None:
        name = _ADDS[delta["type"]]
        self.parts.setdefault(name, []).append(delta[name])

    def pack(self) -> None:
        for parts in self.parts.values():
            parts[:] = ["".join(parts)]

    def whole(self) -> dict[str, Any]:
        added: dict[str, Any] = {name: "".join(parts) for name, parts in self.parts.items()}
        text = added.pop("partial_json", None)
        if self.began.get("type") == "tool_use":
            added["input"] = _input(text) if text else self.began.get("input", {})
        return {**self.began, **added}


class MessagesAssembler:
    def __init__(self) -> None:
        self.is_complete = False
        self._message: dict[str, Any] = {"usage": {}}
        self._blocks: dict[int, _Block] = {}

    @property
    def is_blank(self) -> bool:
        """Whether it has nothing to show, or no start.

        Source: llama-server, build 10434: where the first token is a part of a letter, the stream
        leaves out `message_start`.
        """
        return "id" not in self._message or not any(block.parts for block in self._blocks.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        match piece.get("type"):
            case "message_start":
                self._message = dict(piece["message"])
            case "content_block_start":
                self._blocks[piece["index"]] = _Block(piece["content_block"])
            case "content_block_delta":
                self._blocks[piece["index"]].add(piece["delta"])
            case "message_delta":
                usage = {**self._message["usage"], **piece["usage"]}
                self._message |= {**piece["delta"], "usage": usage}
            case "message_stop":
                self.is_complete = True

    def pack(self) -> None:
        for block in self._blocks.values():
            block.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        self._message = dict(body)
        self._blocks = {at: _Block(block) for at, block in enumerate(body["content"])}

    def message(self) -> Mapping[str, Any] | None:
        return {"role": "assistant", "content": self._content} if self._blocks else None

    def timings(self) -> Mapping[str, Any] | None:
        if not (usage := self._message["usage"]):
            return None
        cached = usage.get("cache_read_input_tokens", 0)
        return token_timings(cached, usage.get("input_tokens", 0), usage.get("output_tokens", 0))

    def other_timings(self) -> Iterable[object]:
        return ()

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        return {**self._message, "content": self._content}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._blocks[at].whole() for at in sorted(self._blocks)]


def _input(text: str) -> Any:
    """Return a tool's input; nothing where the call was cut."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
