"""A request of OpenAI's Responses API as the engine reads it. Pure.

What the engine ignores or refuses, though clients send it, is put into its own words:

- `text.format` becomes `response_format`, as in the chat API
- an assistant's message without `type` gets one
- reasoning without text (a summary, or encrypted) is left out: it tells the engine nothing
- tools that are no functions are left out, as later builds do by themselves
- a member that is null is one that is not given

Source: tools/server/server-chat.cpp of llama.cpp, build 10434; OpenAI's API reference, "Create a
model response".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def engine_members(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members for the engine: the same object where nothing has to change."""
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
    """Return the chat API's member; None where the client gives it, or wants plain text."""
    text = members.get("text")
    given = text.get("format") if isinstance(text, dict) else None
    if not isinstance(given, dict) or members.get("response_format") is not None:
        return None
    if given.get("type") != "json_schema":
        return given if given.get("type") == "json_object" else None
    described = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _input(items: object) -> list[Any] | None:
    """Return the items, or None where they stay as they are."""
    if not isinstance(items, list):
        return None
    kept = [_item(item) for item in items if not _is_silent(item)]
    is_same = len(kept) == len(items) and all(map(_is_same, kept, items))
    return None if is_same else kept


def _is_same(one: object, other: object) -> bool:
    return one is other


def _item(item: Any) -> Any:
    match item:
        case {"role": "assistant"} if "type" not in item:
            return {**item, "type": "message"}
    return item


def _is_silent(item: object) -> bool:
    """Whether an item is reasoning whose text the engine could not read."""
    match item:
        case {"type": "reasoning", "content": [{"text": str()}, *_]}:
            return False
        case {"type": "reasoning"}:
            return True
    return False


def _tools(tools: object) -> list[Any] | None:
    """Return the tools that are functions; None where all are."""
    if not isinstance(tools, list):
        return None
    functions = [tool for tool in tools if not _is_other_tool(tool)]
    return None if len(functions) == len(tools) else functions


def _is_other_tool(tool: object) -> bool:
    match tool:
        case {"type": str(kind)}:
            return kind != "function"
    return False
