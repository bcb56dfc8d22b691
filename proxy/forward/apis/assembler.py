"""The whole answer out of the pieces of a stream, on pages other than OpenAI's completions. Pure.

Source: llama-server, build 10434, both answers to the same request at temperature 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from proxy.endpoints import EndpointKind
from proxy.forward.apis.chat import ChatAssembler
from proxy.upstream.sse import InvalidEvent

# What each kind of piece adds to its block, and where; a call's input comes as JSON in parts.
_ADDS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


class Assembler(Protocol):
    """One answer while it comes, as `ChatAssembler` has it."""

    @property
    def is_complete(self) -> bool:
        """Return whether it has come to its end."""

    @property
    def is_blank(self) -> bool:
        """Return whether it has nothing to show: a stream may have left out its text."""

    def add(self, piece: Mapping[str, Any], /) -> None:
        """Take the next piece.

        What is none of such an answer makes it fail with InvalidEvent, LookupError, TypeError or
        AttributeError.
        """

    def message(self) -> Mapping[str, Any] | None:
        """Return the assistant's message, or None where there is none."""

    def timings(self) -> Mapping[str, Any] | None:
        """Return what it cost, in the words of llama-server's `timings`."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer; InvalidEvent before it is complete."""


def assembler_for(kind: EndpointKind) -> Assembler:
    """Return what assembles the answer to one request."""
    match kind:
        case EndpointKind.MESSAGES:
            return MessagesAssembler()
        case EndpointKind.RESPONSES:
            return ResponsesAssembler()
        case EndpointKind.LLAMA_COMPLETION:
            return LlamaCompletionAssembler()
        case _:
            return ChatAssembler(is_chat=kind is EndpointKind.CHAT)


@dataclass(slots=True)
class _Block:
    """A block of content as far as it has come."""

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
        said = added.pop("partial_json", None)
        if self.began.get("type") == "tool_use":
            added["input"] = _input(said) if said else self.began.get("input", {})
        return {**self.began, **added}


class MessagesAssembler:
    """Anthropic's message."""

    def __init__(self) -> None:
        self.is_complete = False
        self._message: dict[str, Any] = {"usage": {}}
        self._blocks: dict[int, _Block] = {}

    @property
    def is_blank(self) -> bool:
        """Return whether it has nothing to show, or no beginning.

        Source: llama-server, build 10434: where the first token is a part of a letter, the stream
        leaves out `message_start`.
        """
        return "id" not in self._message or not any(block.parts for block in self._blocks.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        """Take the next piece."""
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
        """Keep what has come in as little memory as it needs."""
        for block in self._blocks.values():
            block.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        """Take the whole answer."""
        self._message = dict(body)
        self._blocks = {at: _Block(block) for at, block in enumerate(body["content"])}

    def message(self) -> Mapping[str, Any] | None:
        """Return the assistant's message; None where it says nothing."""
        return {"role": "assistant", "content": self._content} if self._blocks else None

    def timings(self) -> Mapping[str, Any] | None:
        """Return what it cost."""
        if not (usage := self._message["usage"]):
            return None
        cached = usage.get("cache_read_input_tokens", 0)
        return _tokens(cached, usage.get("input_tokens", 0), usage.get("output_tokens", 0))

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        return {**self._message, "content": self._content}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._blocks[at].whole() for at in sorted(self._blocks)]


class ResponsesAssembler:
    """OpenAI's response: the last piece holds nearly all of it."""

    def __init__(self) -> None:
        self._response: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether it has come to its end."""
        return bool(self._response)

    @property
    def is_blank(self) -> bool:
        """Return whether it has nothing to show."""
        return not self._response.get("output")

    def add(self, piece: Mapping[str, Any]) -> None:
        """Take the next piece."""
        if piece.get("type") == "response.completed":
            self.take(piece["response"])
            self._timings = piece.get("timings")

    def pack(self) -> None:
        """Do nothing: only its last piece is kept."""

    def take(self, body: Mapping[str, Any]) -> None:
        """Take the whole answer."""
        usage, self._response = body["usage"], body
        cached = usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        self._timings = _tokens(cached, usage["input_tokens"] - cached, usage["output_tokens"])

    def message(self) -> Mapping[str, Any] | None:
        """Return the assistant's message; None where it says nothing."""
        parts = [part for item in self._response.get("output", ()) for part in _parts(item)]
        return {"role": "assistant", "content": parts} if parts else None

    def timings(self) -> Mapping[str, Any] | None:
        """Return what it cost."""
        return self._timings

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        output = [{"status": "completed", **item} for item in self._response["output"]]
        created_at = self._response.get("created_at")
        return {"completed_at": created_at, **self._response, "output": output}


class LlamaCompletionAssembler:
    """llama-server's own completion of one prompt."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._last: Mapping[str, Any] = {}

    @property
    def is_complete(self) -> bool:
        return self._last.get("stop") is True

    @property
    def is_blank(self) -> bool:
        return not any(self._texts)

    def add(self, piece: Mapping[str, Any]) -> None:
        self._texts.append(piece["content"])
        self._last = piece

    def message(self) -> Mapping[str, Any] | None:
        return None

    def timings(self) -> Mapping[str, Any] | None:
        return self._last.get("timings")

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        settings = {**self._last.get("generation_settings", {}), "stream": False}
        return {**self._last, "content": "".join(self._texts), "generation_settings": settings}


def _input(said: str) -> Any:
    """Return what a tool is called with; nothing where the call was cut."""
    try:
        return orjson.loads(said)
    except orjson.JSONDecodeError:
        return {}


def _parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an item of the responses API as parts of content: a message's own, or itself."""
    return item["content"] if item.get("type") == "message" else [item]


def _tokens(cached: int, computed: int, decoded: int) -> Mapping[str, int]:
    """Return what of `timings` a page tells that tells only tokens."""
    return {"cache_n": cached, "prompt_n": computed, "predicted_n": decoded}
