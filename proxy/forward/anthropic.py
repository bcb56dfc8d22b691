"""Translates the response to a request of Anthropic's messages API that was sent as a chat.

The engine translates requests itself, but drops members that it does not know, such as the format
and LoRA adapters. So only requests with such a member are sent as the chat that has their prompt
(`request/chat_form.py`).

Source: Anthropic's API reference, "Create a Message", `output_config`, and "Streaming messages";
llama-server, build 10434, both streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.errors import BadRequest
from proxy.forward.assemblers import MessagesAssembler, chat_piece
from proxy.forward.response import EventTransform
from proxy.http.api_formats import Event, named_event
from proxy.request.chat_form import anthropic_chat
from proxy.request.request import ProxyRequest
from proxy.request.variants import MEMBER
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE, data_of, members_of

PATH: Final = "/v1/chat/completions"


def schema_of(members: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema of the answer; None if any format is allowed.

    `output_format` is the older name of `output_config.format`.
    """
    config = members.get("output_config")
    given = config.get("format") if isinstance(config, dict) else members.get("output_format")
    match given:
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    return None


_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
# Empty blocks.
_TEXT: Final[Event] = {"type": "text", "text": ""}
_THINKING: Final[Event] = {"type": "thinking", "thinking": "", "signature": ""}


class MessageEvents(EventTransform):
    """Translates one response of a chat; `is_over` is True after a stream's last event."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False
        self._block: object = None  # the open block: "text", "thinking" or the index of a call
        self._index = -1
        self._has_begun = False
        self._stop_reason = "end_turn"
        self._usage: Mapping[str, Any] = {}

    def whole(self, status: int, body: bytes) -> bytes:
        given = orjson.loads(body) if status == HTTPStatus.OK else {}
        if "choices" not in given:  # not a completion
            return body
        assembler = MessagesAssembler()
        for event in events_of(given):
            assembler.add(event)
        return orjson.dumps(assembler.assemble())

    def event(self, event: bytes) -> bytes:
        if data_of(event) == DONE:
            return b"".join([named_event(last["type"], last) for last in self.last_events()])
        if (piece := members_of(event)) is None:  # a comment
            return event
        return b"".join([named_event(made["type"], made) for made in self.events(piece)])

    def events(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        if "error" in piece:
            self.is_over = True
            error = {"type": "api_error", "message": str(piece["error"].get("message"))}
            yield {"type": "error", "error": error}
            return
        if not self._has_begun:
            self._has_begun = True
            message: dict[str, Any] = {
                "id": piece.get("id"),
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": piece.get("model"),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
            yield {"type": "message_start", "message": message}
        self._usage = piece.get("usage") or self._usage
        for choice in piece["choices"]:
            yield from self._delta(choice.get("delta") or {})
            if reason := choice.get("finish_reason"):
                self._stop_reason = _STOP_REASONS.get(reason, "end_turn")

    def last_events(self) -> Iterator[Event]:
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
        """Add to a block; if another one is open, end that one and begin this one."""
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
    events = MessageEvents()
    yield from events.events(chat_piece(body))
    yield from events.last_events()


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "cache_read_input_tokens": cached,
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def as_chat(request: ProxyRequest) -> ProxyRequest | None:
    """Return the chat request for a message with members that only the chat API knows, else None.

    A request of an owner that shares no caches is translated too: only a chat can name its slot. So
    is one whose tool calls are checked.
    Raises BadRequest: it has no messages.
    """
    schema = schema_of(request.json)
    needs_chat = request.owner.is_alone or request.call_retries is not None
    if schema is None and not request.json.get(MEMBER) and not needs_chat:
        return None
    if "messages" not in request.json:
        raise BadRequest("'messages' is required")
    members = anthropic_chat(request.json)
    if schema is not None:
        members["json_schema"] = schema
    return replace(
        request, path=PATH, kind=EndpointKind.CHAT, json=members, body=orjson.dumps(members)
    )
