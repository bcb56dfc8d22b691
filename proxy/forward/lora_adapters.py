"""`/lora-adapters`: without paths of this machine.

Source: llama-server, build 10434: a list of objects, each with the `path` of its file.
"""

from __future__ import annotations

from typing import Final

import orjson

from proxy.forward.props import file_name
from proxy.forward.rewritten_response import RewrittenResponse

PATH: Final = "/lora-adapters"
_MAX_BYTES: Final = 1024**2


class LoraAdaptersResponse(RewrittenResponse):
    """A list of adapters; each `path` is reduced to the name of the file."""

    max_bytes = _MAX_BYTES

    def rewritten(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of all responses)
        return without_paths(body)


def without_paths(body: bytes) -> bytes:
    try:
        adapters = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(adapters, list):
        return body
    return orjson.dumps([_without_path(adapter) for adapter in adapters])


def _without_path(adapter: object) -> object:
    if isinstance(adapter, dict) and isinstance(adapter.get("path"), str):
        return {**adapter, "path": file_name(adapter["path"])}
    return adapter
