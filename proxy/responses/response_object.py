"""The object `response` with every member that OpenAI's has. Pure.

Source: OpenAI's API reference, "The response object"; openai-python 3.54, `types/responses`. The
engine (build 10434) leaves out what repeats the request, and in its first events nearly all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What repeats the request, and what it is where the request does not say.
_REPEATED: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": None,
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_CUT: Final = {"reason": "max_output_tokens"}


def repeated(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a response that repeat its request."""
    given = {name: members[name] for name in _REPEATED.keys() & members.keys()}
    return {**_REPEATED, **{name: value for name, value in given.items() if value is not None}}


def begun(base: Mapping[str, Any], response_id: str, created_at: int) -> dict[str, Any]:
    """Return a response that has no output yet."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **base,
    }


def completed(base: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's complete response with the members that it lacks.

    The engine does not tell why it stopped. A response with as many tokens as it may have was cut.
    """
    usage = _usage(response.get("usage") or {})
    limit = base.get("max_output_tokens")
    is_cut = isinstance(limit, int) and 0 < limit <= usage["output_tokens"]
    output = [item_of(item) for item in response.get("output") or ()]
    found = {**base, "error": None, **response, "output": output, "usage": usage}
    found["incomplete_details"] = _CUT if is_cut else None
    found["status"] = "incomplete" if is_cut else response.get("status", "completed")
    return found


def item_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the output with the members that the engine leaves out."""
    found = {"status": "completed", **item}
    if item.get("type") == "function_call":
        found.setdefault("id", item.get("call_id"))
    return found


def part_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a message's content with the members that the engine leaves out."""
    return {"annotations": [], "logprobs": [], **part}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, **usage}
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    tokens["input_tokens_details"] = {**cached, **(usage.get("input_tokens_details") or {})}
    reasoned = {"reasoning_tokens": 0}
    tokens["output_tokens_details"] = {**reasoned, **(usage.get("output_tokens_details") or {})}
    return tokens
