"""Rewrites members that an engine ignores or refuses into members that it knows. Pure.

`tool_choice` that names tools: llama-server takes `auto`, `none` and `required`. It reads an object
as `auto` in OpenAI's APIs, and as `required` with any of the tools in Anthropic's. So the tools
that the client does not name are left out. The prompt then differs from that of a turn with all
tools.

A request of OpenAI's Responses API:

- `text.format` becomes `response_format`, as in the chat API
- an assistant's message without `type` gets one
- reasoning without text (a summary, or encrypted) is left out, because the engine cannot use it
- tools that are no functions are left out, as later builds do themselves
- a member that is null counts as not given

Source: llama-server, build 10434, `oaicompat_chat_params_parse` and tools/server/server-chat.cpp;
OpenAI's API reference, "Create chat completion" and "Create a model response"; Anthropic's, "Create
a Message".
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any, Final

from proxy.upstream.endpoint_kinds import EndpointKind

_MODES: Final = frozenset({"auto", "required"})


def with_chosen_tools(kind: EndpointKind, members: dict[str, Any]) -> dict[str, Any]:
    """Keep only the named tools; return the same object if nothing changes.

    Unknown tool names and other forms of the choice are left to the engine.
    """
    tools = members.get("tools")
    match _choose_tools(kind, members["tool_choice"]):
        case (mode, names) if isinstance(tools, list):
            chosen = [tool for tool in tools if _name(tool) in names]
            if chosen:
                # In Anthropic's API the engine reads the object as `required`.
                choice = members["tool_choice"] if kind is EndpointKind.MESSAGES else mode
                return {**members, "tools": chosen, "tool_choice": choice}
    return members


def _choose_tools(
    kind: EndpointKind, choice: Mapping[str, Any]
) -> tuple[str, frozenset[str]] | None:
    match kind, choice:
        case EndpointKind.CHAT, {"type": "function", "function": {"name": str(name)}}:
            return "required", frozenset({name})
        case EndpointKind.RESPONSES, {"type": "function", "name": str(name)}:
            return "required", frozenset({name})
        case EndpointKind.MESSAGES, {"type": "tool", "name": str(name)}:
            return "required", frozenset({name})
        case EndpointKind.CHAT, {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allow_tools(allowed)
        case EndpointKind.RESPONSES, {"type": "allowed_tools"}:
            return _allow_tools(choice)
    return None


def _allow_tools(allowed: Mapping[str, Any]) -> tuple[str, frozenset[str]] | None:
    match allowed:
        case {"mode": str(mode), "tools": list(tools)} if mode in _MODES:
            found = (_name(tool) for tool in tools)
            return mode, frozenset(name for name in found if name is not None)
    return None


def _name(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return None


def engine_members(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members for the engine; the same object if nothing changes."""
    changes = {
        "response_format": _response_format(members),
        "input": _input(members.get("input")),
        "tools": _tools(members.get("tools")),
    }
    changed = {name: value for name, value in changes.items() if value is not None}
    if not changed and None not in members.values():
        return members
    given = {name: value for name, value in members.items() if value is not None}
    return given | changed


def _response_format(members: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the chat API's member; None if the client gives it or wants plain text."""
    text = members.get("text")
    given = text.get("format") if isinstance(text, dict) else None
    if not isinstance(given, dict) or members.get("response_format") is not None:
        return None
    if given.get("type") != "json_schema":
        return given if given.get("type") == "json_object" else None
    described = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _input(items: object) -> list[Any] | None:
    if not isinstance(items, list):
        return None
    kept: list[Any] = []
    for item in items:
        match item:
            case {"type": "reasoning", "content": [{"text": str()}, *_]}:
                kept.append(item)
            case {"type": "reasoning"}:  # without text that the engine can read
                continue
            case {"role": "assistant"} if "type" not in item:
                kept.append({**item, "type": "message"})
            case _:
                kept.append(item)
    is_unchanged = len(kept) == len(items) and all(map(is_, kept, items))
    return None if is_unchanged else kept


def _tools(tools: object) -> list[Any] | None:
    if not isinstance(tools, list):
        return None
    functions: list[Any] = []
    for tool in tools:
        match tool:
            case {"type": str(kind)} if kind != "function":
                continue
        functions.append(tool)
    return None if len(functions) == len(tools) else functions
