"""One event of a stream of the Responses API, and the event for an error. Pure.

Source: OpenAI's API reference, "Streaming events", `error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

Event = dict[str, Any]


def written(event: Event, number: int) -> bytes:
    """Return an event with its number."""
    event["sequence_number"] = number
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def failed(body: Mapping[str, Any]) -> Event:
    """Return the event for an error's body; `error` is where libraries of other APIs look."""
    given = body.get("error") or body
    error = given if isinstance(given, dict) else {"message": str(given)}
    code, kind = error.get("code"), error.get("type")
    shown = {"param": None, **error, "code": code if isinstance(code, str) else str(kind)}
    own = {name: shown.get(name) for name in ("code", "message", "param")}
    return {"type": "error", **own, "error": shown}
