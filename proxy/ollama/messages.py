"""Ollama's messages as those of OpenAI's chat API. Pure.

A call of a tool has no id in Ollama's API; a result names the tool, or follows its call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import orjson

from proxy.errors import BadRequest

# How an image in base64 begins, by its first bytes.
_IMAGE_TYPES: Final = MappingProxyType(
    {"iVBORw0KGgo": "image/png", "R0lGOD": "image/gif", "UklGR": "image/webp", "Qk": "image/bmp"}
)
_JPEG: Final = "image/jpeg"


def messages_of(given: object) -> list[dict[str, Any]]:
    """Return the messages; raises BadRequest."""
    if not isinstance(given, list):
        raise BadRequest("the member messages must be a list")
    calls: deque[tuple[str, str]] = deque()
    return [_message(number, _object(one, "message"), calls) for number, one in enumerate(given)]


def user_message(prompt: object, images: object) -> dict[str, Any]:
    return {"role": "user", "content": _content(prompt, images)}


def _message(
    number: int, given: Mapping[str, Any], calls: deque[tuple[str, str]]
) -> dict[str, Any]:
    """Return a message; `calls` are the ids and names of calls without a result yet."""
    message = {
        "role": given.get("role"),
        "content": _content(given.get("content"), given.get("images")),
    }
    if given.get("role") == "tool":
        return {**message, **_answered(given, calls)}
    if thinking := given.get("thinking"):
        message["reasoning_content"] = thinking
    if called := _list(given, "tool_calls"):
        made = [
            _call(_object(call, "tool call"), f"call_{number}_{at}")
            for at, call in enumerate(called)
        ]
        calls.clear()
        calls.extend((one["id"], one["function"]["name"]) for one in made)
        message["tool_calls"] = made
    return message


def _answered(given: Mapping[str, Any], calls: deque[tuple[str, str]]) -> dict[str, Any]:
    """Return what says which call a result is of."""
    wanted = given.get("tool_call_id")
    name = given.get("tool_name") or given.get("name")
    fitting = (one for one in calls if name in {one[1], None} and wanted in {one[0], None})
    if found := next(fitting, None):
        calls.remove(found)
    call_id, called = found or (wanted or "", name)
    return {"tool_call_id": call_id, **({"name": name or called} if name or called else {})}


def _call(given: Mapping[str, Any], new_id: str) -> dict[str, Any]:
    function = _object(given.get("function"), "function of a tool call")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {
        "id": given.get("id") or new_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def _content(text: object, images: object) -> object:
    if not images:
        return "" if text is None else text
    if not isinstance(images, list):
        raise BadRequest("the member images must be a list")
    return [{"type": "text", "text": text or ""}, *_images(images)]


def _images(images: Sequence[object]) -> Iterator[dict[str, Any]]:
    for image in images:
        if not isinstance(image, str):
            raise BadRequest("an image must be a string in base64")
        kinds = (kind for start, kind in _IMAGE_TYPES.items() if image.startswith(start))
        url = f"data:{next(kinds, _JPEG)};base64,{image}"
        yield {"type": "image_url", "image_url": {"url": url}}


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name) or []
    if not isinstance(found, list):
        raise BadRequest(f"the member {name} must be a list")
    return found


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"each {what} must be an object")
    return value
