"""Translates Anthropic's messages API to OpenAI's chat API, and the response back.

The engine translates a request in the same way, but drops members that it does not know, such as
the format and LoRA adapters. So only requests with one of these are translated here.

Source: tools/server/server-chat.cpp of llama.cpp, build 10434, whose choices are repeated here, so
that the prompt is the same; Anthropic's API reference, "Create a Message", `output_config`, and
"Streaming messages"; llama-server, build 10434, both streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.errors import BadRequest
from proxy.forward.assemblers import MessagesAssembler, chat_piece
from proxy.forward.response import EventTransform
from proxy.http.api_formats import Event, named_event
from proxy.request.request import ProxyRequest
from proxy.request.variants import MEMBER
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE, data_of, members_of

PATH: Final = "/v1/chat/completions"

_KEPT: Final = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", MEMBER)
_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_MAX_TOKENS: Final = 4096
_THINKING_TOKENS: Final = 10_000


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


def chat_members(members: Mapping[str, Any], schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the chat request; the engine refuses members that do not have Anthropic's types."""
    asked = {name: members[name] for name in _KEPT if name in members}
    asked["messages"] = []
    system = members.get("system")
    if system is not None:
        text = system if isinstance(system, str) else "".join(_texts(system))
        asked["messages"].append({"role": "system", "content": text})
    asked["messages"] += _messages(members["messages"])
    asked["max_tokens"] = members.get("max_tokens", _MAX_TOKENS)
    if schema is not None:
        asked["json_schema"] = schema
    if "stop_sequences" in members:
        asked["stop"] = members["stop_sequences"]
    if members.get("stream") is True:
        asked["stream_options"] = {"include_usage": True}
    match members.get("thinking"):
        case {"type": "enabled", **given}:
            asked["thinking_budget_tokens"] = given.get("budget_tokens", _THINKING_TOKENS)
    return asked | _tools(members)


def _texts(blocks: object) -> Iterator[str]:
    for block in blocks if isinstance(blocks, list) else ():
        match block:
            case {"type": "text", "text": str(text)}:
                yield text


def _messages(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        match message:
            case {"role": str(role), "content": list(blocks)}:
                yield from _message(role, [block for block in blocks if isinstance(block, dict)])
            case _:
                yield message


def _message(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    content = [part for block in blocks if (part := _part(block))]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thinking = (block.get("thinking") for block in blocks if block.get("type") == "thinking")
    thoughts = [thought for thought in thinking if isinstance(thought, str) and thought]
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if content or calls or thoughts:
        yield message
    for block in blocks:
        if block.get("type") == "tool_result":
            yield _result(block)


def _part(block: Mapping[str, Any]) -> dict[str, Any] | None:
    match block:
        case {"type": "text", "text": text}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "url", "url": url}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "base64", "data": data, **source}}:
            kind = source.get("media_type", "image/jpeg")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    return None


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input", {})).decode()
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("content")
    parts = [part for block in given if (part := _part(block))] if isinstance(given, list) else []
    is_text = all(isinstance(part.get("text"), str) for part in parts)
    content: Any = "".join(part["text"] for part in parts) if is_text else parts
    if isinstance(given, str):
        content = given
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content}


def _tools(members: Mapping[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if isinstance(tools := members.get("tools"), list):
        asked["tools"] = [_tool(tool) for tool in tools if isinstance(tool, dict)]
    match members.get("tool_choice"):
        case {"type": str(kind)} if kind in _CHOICES:
            asked["tool_choice"] = _CHOICES[kind]
    return asked


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": tool.get("name", ""), "description": tool.get("description", "")}
    return {"type": "function", "function": {**named, "parameters": tool.get("input_schema", {})}}


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

    A request of an owner that shares no caches is translated too: only a chat can name its slot.
    Raises BadRequest: it has no messages.
    """
    schema = schema_of(request.json)
    if schema is None and not request.json.get(MEMBER) and not request.owner.is_alone:
        return None
    if "messages" not in request.json:
        raise BadRequest("'messages' is required")
    members = chat_members(request.json, schema)
    return replace(
        request, path=PATH, kind=EndpointKind.CHAT, json=members, body=orjson.dumps(members)
    )
