"""Writes errors in the format of the client's API: whole responses, or the last event of a stream.

Pure. `/v1/messages` gets Anthropic's format, `/api/` Ollama's, a stream of the Responses API an
event of its own, all others OpenAI's. Source: OpenAI's API reference, "Streaming events", `error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.errors import ProxyError, anthropic_type, openai_type

Event = dict[str, Any]

EVENT_END: Final = b"\n\n"
_ANTHROPIC_PATH: Final = "/v1/messages"
_OLLAMA_PATH: Final = "/api/"
_WITH_EVENT_NAMES: Final = (_ANTHROPIC_PATH, "/stream/generate")


def event_bytes(event: Event, number: int) -> bytes:
    event["sequence_number"] = number
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def error_as_event(body: Mapping[str, Any]) -> Event:
    """Return the event for an error's body; libraries of other APIs read its member `error`."""
    given = body.get("error") or body
    error = given if isinstance(given, dict) else {"message": str(given)}
    code, kind = error.get("code"), error.get("type")
    shown = {"param": None, **error, "code": code if isinstance(code, str) else str(kind)}
    own = {name: shown.get(name) for name in ("code", "message", "param")}
    return {"type": "error", **own, "error": shown}


def error_response(path: str, error: ProxyError) -> web.Response:
    response = web.Response(
        status=error.status,
        headers=error.headers(),
        body=orjson.dumps(error_body(path, error)),
        content_type="application/json",
    )
    if error.ends_connection:
        response.force_close()
    return response


def error_event(path: str, body: bytes) -> bytes:
    if path.endswith("/responses"):
        return event_bytes(error_as_event(orjson.loads(body)), 0)
    name = b"event: error\n" if path.startswith(_WITH_EVENT_NAMES) else b""
    return name + b"data: " + body + EVENT_END


def error_body(path: str, error: ProxyError) -> dict[str, object]:
    if path.startswith(_OLLAMA_PATH):
        return {"error": error.message}
    if path.startswith(_ANTHROPIC_PATH):
        details = {"type": anthropic_type(error.status), "message": error.message}
        return {"type": "error", "error": details}
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }
