"""The header fields that cross the proxy, in each direction.

To an instance: hop-by-hop fields end here, and so does every field that `Connection` names. Source:
RFC 9110 section 7.6.1. Fields that concern only the client's side (keys, cookies, origin, framing,
its address and the names of its conversations) never reach an instance.

To a client: two fields, and the content types that the proxy sends itself. A browser reads an
instance's response under the dashboard's origin, so a hostile node must not set a cookie there,
clear its storage, redirect it or have its body shown as a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.common.toml_text import table_beside

# Fields of every response, final; for errors outside of a request see `http.connections`.
RESPONSE_HEADERS: Final = web.RequestKey("response_headers", dict[str, str])
SERVER: Final = "llama-corral"
EVENT_STREAM: Final = "text/event-stream"
JSON: Final = "application/json; charset=utf-8"
# In requests of another llama-corral proxy; they must not be forwarded again.
HOP: Final = "X-Corral-Hop"
# In a response to such a request: the answering process. In any response: it is stopping.
PROCESS: Final = "X-Corral-Process"
DRAINING: Final = "X-Corral-Draining"
# `batch` queues a request behind all interactive ones.
PRIORITY: Final = "X-Corral-Priority"
# In a request from another proxy: its client, whose caches are for no other.
CACHE_OWNER: Final = "X-Corral-Cache-Owner"
# In a request from another proxy: the process that has most of its conversation.
HOLDER: Final = "X-Corral-Holder"
# In a response: the model that answered in place of another. In a request: `none` forbids that.
FALLBACK: Final = "X-Corral-Fallback"
# In a request: `repair` has broken tool calls repaired, `pass` forbids it.
TOOL_CALLS: Final = "X-Corral-Tool-Calls"
# Fields of responses for one client alone, below `/corral/v1/`.
PRIVATE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)

# Of a request: its answer is to explain where the time went, and why its prompt was not cached.
EXPLAIN: Final = "X-Corral-Explain"
# Of the response to such a request: the engine's `id_slot`, within X-Corral-Instance.
SLOT: Final = "X-Corral-Slot"

_Fields = CIMultiDict[str] | CIMultiDictProxy[str]

_TABLES: Final = table_beside(__file__)
_HOP_BY_HOP: Final = frozenset[str](_TABLES["hop_by_hop"])
SESSION_FIRST: Final[Sequence[str]] = _TABLES["session_first"]
SESSION_LAST: Final[Sequence[str]] = _TABLES["session_last"]
_NOT_UPSTREAM: Final = _HOP_BY_HOP.union(SESSION_FIRST, SESSION_LAST, _TABLES["not_upstream"])
# The only fields of an instance that reach a client, besides the content type.
_DOWNSTREAM: Final[tuple[str, ...]] = ("Content-Length", "Retry-After")
# Intermediaries that store or buffer a stream would deliver all tokens late and at once.
_OF_STREAM: Final = (
    ("Content-Type", EVENT_STREAM),
    ("Cache-Control", "no-store"),
    ("X-Accel-Buffering", "no"),
)
# cpp-httplib refuses a field over 8 KiB and more than 100 fields, with an empty body. An engine
# does not use the omitted fields. Source: httplib.h, CPPHTTPLIB_HEADER_MAX_LENGTH and _MAX_COUNT.
_FIELD_MAX_CHARACTERS: Final = 4096
_FIELDS_MAX: Final = 64
# CORS both ways; fields of browsers and proxies about the client; fields for us alone.
_NEVER: Final = ("access-control-", "sec-", "x-auth-request-", "x-corral-", "x-forwarded-")


def for_upstream(fields: _Fields) -> CIMultiDict[str]:
    """Return a client's header fields that an instance may see and can accept."""
    dropped = _NOT_UPSTREAM
    if "Connection" in fields:
        named = {name.strip() for name in ",".join(fields.getall("Connection")).lower().split(",")}
        if not named - dropped <= {"close"}:
            dropped |= named
    items = fields.items()
    are_passed = _are_passed(tuple(map(itemgetter(0), items)), dropped)
    passed = [
        (name, value)
        for name, value in compress(items, are_passed)
        if len(name) + len(value) <= _FIELD_MAX_CHARACTERS
    ]
    return CIMultiDict(passed[:_FIELDS_MAX])


def for_client(fields: _Fields) -> CIMultiDict[str]:
    """Return an instance's header fields for the client, adapted to a stream if it is one.

    The content type is JSON unless it is an event stream.
    """
    if is_event_stream(fields):
        # Without its length: events may be rewritten and added, and bytes beyond the length would
        # be the next response.
        passed, names = CIMultiDict(_OF_STREAM), _DOWNSTREAM[1:]
    else:
        passed, names = CIMultiDict({"Content-Type": JSON}), _DOWNSTREAM
    for name in names:
        if name in fields:
            passed[name] = fields[name]
    return passed


def is_event_stream(fields: _Fields) -> bool:
    return _media_type(fields.get("Content-Type", "")) == EVENT_STREAM


def is_json(fields: _Fields) -> bool:
    return _media_type(fields.get("Content-Type", "")) in {"", "application/json"}


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


# Clients send the same names again and again.
@lru_cache(maxsize=128)
def _are_passed(names: tuple[str, ...], dropped: frozenset[str]) -> list[bool]:
    lower = map(str.lower, names)
    return [name not in dropped and not name.startswith(_NEVER) for name in lower]
