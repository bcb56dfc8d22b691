"""The message that an answer holds and what it cost, read page by page. Pure.

The message is in the words of OpenAI's chat API, where content may be a list of parts in the words
of the page's own API. Pages without roles have no message.

Source: llama-server's answers, build 10434. Anthropic's page and a whole answer of OpenAI's
responses tell no `timings`, only tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from proxy.carry.assemble import Assembly
from proxy.pages import Kind


class Reader(Protocol):
    """Reads one answer, as the pieces of a stream or as a whole body.

    What is no such answer makes it fail with Garbled, LookupError, TypeError or AttributeError.
    """

    @property
    def timings(self) -> Mapping[str, Any] | None:
        """What it cost, in the words of llama-server's `timings`; None where it does not say."""

    def add(self, piece: Mapping[str, Any]) -> None:
        """Read the next piece of a stream."""

    def pack(self) -> None:
        """Keep what was read in as little memory as it needs."""

    def take(self, body: Mapping[str, Any]) -> None:
        """Read a whole body."""

    def message(self) -> Mapping[str, Any] | None:
        """Return the assistant's message, or None where there is none."""


def reader_of(kind: Kind) -> Reader:
    """Return a reader for the answer to one request."""
    match kind:
        case Kind.CHAT:
            return _Chat()
        case Kind.MESSAGES:
            return _Messages()
        case Kind.RESPONSES:
            return _Responses()
        case _:
            return _Cost()


class _Cost:
    """Any page that tells `timings` and has no message."""

    def __init__(self) -> None:
        self.timings: Mapping[str, Any] | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        self.timings = piece.get("timings") or self.timings

    def pack(self) -> None:
        return

    def take(self, body: Mapping[str, Any]) -> None:
        self.timings = body.get("timings")

    def message(self) -> Mapping[str, Any] | None:
        return None


class _Chat(_Cost):
    def __init__(self) -> None:
        super().__init__()
        self._assembly = Assembly(is_chat=True)
        self._message: Mapping[str, Any] | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        self._assembly.add(piece)
        self.timings = self._assembly.timings()

    def pack(self) -> None:
        self._assembly.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        super().take(body)
        self._message = body["choices"][0]["message"]

    def message(self) -> Mapping[str, Any] | None:
        return self._message or (self._assembly.message() if self._assembly.is_complete else None)


class _Messages(_Cost):
    def __init__(self) -> None:
        super().__init__()
        self._usage: Mapping[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []

    def add(self, piece: Mapping[str, Any]) -> None:
        match piece.get("type"):
            case "message_start":
                self._cost(piece["message"]["usage"])
            case "message_delta":
                self._cost({**self._usage, **piece["usage"]})
            case "content_block_start":
                self._blocks.append(dict(piece["content_block"]))
                self._texts.append([])
            case "content_block_delta":
                delta = piece["delta"]
                self._texts[-1].append(delta.get("text") or delta.get("partial_json") or "")

    def pack(self) -> None:
        for texts in self._texts:
            texts[:] = ["".join(texts)]

    def take(self, body: Mapping[str, Any]) -> None:
        self._cost(body["usage"])
        self._blocks = body["content"]

    def message(self) -> Mapping[str, Any] | None:
        if self._texts:
            self._blocks = list(map(_filled, self._blocks, self._texts))
            self._texts = []
        return {"role": "assistant", "content": self._blocks} if self._blocks else None

    def _cost(self, usage: Mapping[str, Any]) -> None:
        self._usage = usage
        cached = usage.get("cache_read_input_tokens", 0)
        self.timings = _tokens(cached, usage["input_tokens"], usage["output_tokens"])


class _Responses(_Cost):
    def __init__(self) -> None:
        super().__init__()
        self._items: list[Mapping[str, Any]] = []

    def add(self, piece: Mapping[str, Any]) -> None:
        if piece.get("type") == "response.completed":
            self.take(piece["response"])
            super().add(piece)

    def take(self, body: Mapping[str, Any]) -> None:
        usage, self._items = body["usage"], body["output"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        self.timings = _tokens(cached, usage["input_tokens"] - cached, usage["output_tokens"])

    def message(self) -> Mapping[str, Any] | None:
        parts = [part for item in self._items for part in _parts(item)]
        return {"role": "assistant", "content": parts} if parts else None


def _tokens(cached: int, computed: int, decoded: int) -> Mapping[str, int]:
    """Return what of `timings` a page tells that tells only tokens."""
    return {"cache_n": cached, "prompt_n": computed, "predicted_n": decoded}


def _filled(block: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    text = "".join(texts)
    if block.get("type") != "tool_use":
        return {**block, "text": text}
    try:
        return {**block, "input": orjson.loads(text)}
    except orjson.JSONDecodeError:
        return {**block, "input": {}}


def _parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an item of the responses API as parts of content: a message's own, or itself."""
    return item["content"] if item.get("type") == "message" else [item]
