"""The engine's request and answer as the proxy passes them on; only the Responses API differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.forward.openai_responses import StreamEvents, complete_response, request_members
from proxy.request.engine_members import engine_members


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the request as the engine gets it."""
    return engine_members(body) if path.endswith("/responses") else body


def mended(path: str, body: Mapping[str, Any], status: int, content: bytes) -> bytes:
    if not path.endswith("/responses") or status != 200:
        return content
    base = {"model": body["model"], **request_members(body), "store": False}
    if body.get("stream") is True:
        return StreamEvents(base, "resp_0", 0).feed(content)
    return orjson.dumps(complete_response(base, orjson.loads(content)))
