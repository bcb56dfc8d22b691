"""`tool_choice` that names tools, in the words that the engine has: all tools, and a mode. Pure.

llama-server takes `auto`, `none` and `required`. An object it reads as `auto` in OpenAI's APIs, and
as `required` with any of the tools in Anthropic's. So the tools that the client does not name are
left out. The prompt then differs from that of a turn with all tools.

Source: llama-server, build 10434, `oaicompat_chat_params_parse`; OpenAI's API reference, "Create
chat completion" and "Create a model response", `tool_choice`; Anthropic's, "Create a Message".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from proxy.endpoints import EndpointKind

_MODES: Final = frozenset({"auto", "required"})


def with_chosen_tools(kind: EndpointKind, members: dict[str, Any]) -> dict[str, Any]:
    """Return the members with the tools that are named; the same object where nothing changes.

    A name that no tool has is left to the engine, as is a choice of another form.
    """
    tools = members.get("tools")
    match _chosen(kind, members["tool_choice"]):
        case (mode, names) if isinstance(tools, list):
            chosen = [tool for tool in tools if _name(tool) in names]
            if chosen:
                # In Anthropic's API the engine reads the object as `required`.
                choice = members["tool_choice"] if kind is EndpointKind.MESSAGES else mode
                return {**members, "tools": chosen, "tool_choice": choice}
    return members


def _chosen(kind: EndpointKind, choice: Mapping[str, Any]) -> tuple[str, frozenset[str]] | None:
    """Return a mode of the engine and the tools that may be called."""
    match kind, choice:
        case EndpointKind.CHAT, {"type": "function", "function": {"name": str(name)}}:
            return "required", frozenset({name})
        case EndpointKind.RESPONSES, {"type": "function", "name": str(name)}:
            return "required", frozenset({name})
        case EndpointKind.MESSAGES, {"type": "tool", "name": str(name)}:
            return "required", frozenset({name})
        case EndpointKind.CHAT, {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(allowed)
        case EndpointKind.RESPONSES, {"type": "allowed_tools"}:
            return _allowed(choice)
    return None


def _allowed(allowed: Mapping[str, Any]) -> tuple[str, frozenset[str]] | None:
    match allowed:
        case {"mode": str(mode), "tools": list(tools)} if mode in _MODES:
            return mode, _names(tools)
    return None


def _names(tools: Iterable[object]) -> frozenset[str]:
    return frozenset(name for tool in tools if (name := _name(tool)) is not None)


def _name(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return None
