"""A stream of OpenAI's chat API as one of Anthropic's messages API. Pure.

Source: Anthropic's API reference, "Streaming messages"; llama-server, build 10434, both streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from proxy.upstream.sse import DONE, InvalidEvent, Splitter, data_of, members_of

Event = dict[str, Any]

_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
# A block before it has anything.
_TEXT: Final[Event] = {"type": "text", "text": ""}
_THINKING: Final[Event] = {"type": "thinking", "thinking": "", "signature": ""}


class MessageEvents:
    """One stream; `is_over` after its last event."""

    def __init__(self) -> None:
        self.is_over = False
        self._splitter = Splitter()
        self._block: object = None  # what the open block is of
        self._index = -1
        self._has_begun = False
        self._stop_reason = "end_turn"
        self._usage: Mapping[str, Any] = {}

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes, return the client's; raises InvalidEvent."""
        return b"".join([self._translated(event) for event in self._splitter.feed(chunk)])

    def _translated(self, raw: bytes) -> bytes:
        if data_of(raw) == DONE:
            return b"".join(map(written, self.end()))
        piece = members_of(raw)
        if piece is None:  # a comment
            return raw
        try:
            return b"".join(map(written, self.events(piece)))
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of a chat: {error!r}") from error

    def events(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events for a piece of a chat."""
        if "error" in piece:
            self.is_over = True
            error = {"type": "api_error", "message": str(piece["error"].get("message"))}
            yield {"type": "error", "error": error}
            return
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": _begun(piece)}
        self._usage = piece.get("usage") or self._usage
        for choice in piece["choices"]:
            yield from self._delta(choice.get("delta") or {})
            if reason := choice.get("finish_reason"):
                self._stop_reason = _STOP_REASONS.get(reason, "end_turn")

    def end(self) -> Iterator[Event]:
        """Yield the last events."""
        yield from self._stop()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(self._usage)}
        yield {"type": "message_stop"}
        self.is_over = True

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if text := delta.get("reasoning_content"):
            yield from self._add("thinking", _THINKING, "thinking_delta", thinking=text)
        if text := delta.get("content"):
            yield from self._add("text", _TEXT, "text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            block = {"type": "tool_use", "id": call.get("id"), "name": function.get("name")}
            arguments = function.get("arguments") or ""
            at = call["index"]
            yield from self._add(
                at, {**block, "input": {}}, "input_json_delta", partial_json=arguments
            )

    def _add(self, block: object, empty: Event, kind: str, **added: str) -> Iterator[Event]:
        """Add to a block, which begins where another one was open."""
        if self._block != block:
            yield from self._stop()
            self._block = block
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": empty}
        if any(added.values()):
            delta = {"type": kind, **added}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self._block = None


def events_of(body: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for a whole chat completion."""
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
    piece = {**choice, "delta": {**message, "tool_calls": calls}}
    events = MessageEvents()
    yield from events.events({**body, "choices": [piece]})
    yield from events.end()


def written(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def _begun(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": piece.get("id"),
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": piece.get("model"),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "cache_read_input_tokens": cached,
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }
