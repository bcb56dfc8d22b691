"""A request of Anthropic's messages API as one of OpenAI's chat API. Pure.

The engine makes the same of a request, but for its format and its LoRA adapters: it leaves out each
member that it does not know. Used only for requests that have one of these.

Source: tools/server/server-chat.cpp of llama.cpp, build 10434, whose choices are repeated here, so
that the prompt is the same; Anthropic's API reference, "Create a Message", `output_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.adapter import MEMBER

PATH: Final = "/v1/chat/completions"

_KEPT: Final = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", MEMBER)
_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_MAX_TOKENS: Final = 4096
_THINKING_TOKENS: Final = 10_000


def schema_of(members: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema that the answer must have; None for an answer of any format.

    `output_format` is the older name of `output_config.format`.
    """
    config = members.get("output_config")
    given = config.get("format") if isinstance(config, dict) else members.get("output_format")
    match given:
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    return None


def chat_members(members: Mapping[str, Any], schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the request; what has another type than Anthropic's is the engine's to refuse."""
    asked = {name: members[name] for name in _KEPT if name in members}
    asked["messages"] = [*_system(members.get("system")), *_messages(members["messages"])]
    asked["max_tokens"] = members.get("max_tokens", _MAX_TOKENS)
    if schema is not None:
        named = {"name": "output", "strict": True, "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    if "stop_sequences" in members:
        asked["stop"] = members["stop_sequences"]
    if members.get("stream") is True:
        asked["stream_options"] = {"include_usage": True}
    return asked | _tools(members) | _thinking(members.get("thinking"))


def _system(system: object) -> list[dict[str, Any]]:
    if system is None:
        return []
    text = system if isinstance(system, str) else "".join(_texts(system))
    return [{"role": "system", "content": text}]


def _texts(blocks: object) -> Iterator[str]:
    for block in blocks if isinstance(blocks, list) else ():
        match block:
            case {"type": "text", "text": str(text)}:
                yield text


def _messages(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        match message:
            case {"role": str(role), "content": list(blocks)}:
                yield from _message(role, [one for one in blocks if isinstance(one, dict)])
            case _:
                yield message


def _message(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    content = [part for block in blocks if (part := _part(block))]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [thought for block in blocks if (thought := _thought(block))]
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


def _thought(block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "thinking", "thinking": str(thought)}:
            return thought
    return ""


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
    parts = [part for one in given if (part := _part(one))] if isinstance(given, list) else []
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
    return {
        "type": "function",
        "function": {**named, "parameters": tool.get("input_schema", {})},
    }


def _thinking(thinking: object) -> dict[str, Any]:
    match thinking:
        case {"type": "enabled", **given}:
            return {"thinking_budget_tokens": given.get("budget_tokens", _THINKING_TOKENS)}
    return {}
