"""The engine's request and answer as the proxy passes them on; only the Responses API differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.responses.engine_request import engine_members
from proxy.responses.response_object import completed, repeated
from proxy.responses.stream_events import StreamEvents


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the request as the engine gets it."""
    return engine_members(body) if path.endswith("/responses") else body


def mended(path: str, body: Mapping[str, Any], status: int, content: bytes) -> bytes:
    if not path.endswith("/responses") or status != 200:
        return content
    base = {"model": body["model"], **repeated(body), "store": False}
    if body.get("stream") is True:
        return StreamEvents(base, "resp_0", 0).feed(content)
    return orjson.dumps(completed(base, orjson.loads(content)))
