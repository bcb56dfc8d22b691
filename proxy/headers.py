"""Which header fields cross the proxy, in each direction.

Hop-by-hop fields end here, and so does every field that `Connection` names. Source: RFC 9110
section 7.6.1. What concerns only the client's side (keys, cookies, origin, framing) never reaches
an instance; what an instance says of itself (CORS, server, date) never reaches a client.
"""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

_Fields = CIMultiDict[str] | CIMultiDictProxy[str]

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# X-Conversation-Id makes an engine go on generating after its client has left (build 11434).
# The body arrives decompressed and may be rewritten, so its encoding and length are ours to say.
_NOT_UPSTREAM: Final = _HOP_BY_HOP | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "content-length",
    "cookie",
    "expect",
    "host",
    "origin",
    "x-api-key",
    "x-conversation-id",
    "x-request-id",
}
_NOT_DOWNSTREAM: Final = _HOP_BY_HOP | {"date", "server", "vary", "x-request-id"}
_CORS_PREFIX: Final = "access-control-"


def for_upstream(fields: _Fields) -> CIMultiDict[str]:
    """Return what of a client's header an instance may see."""
    return _without(fields, _NOT_UPSTREAM)


def for_client(fields: _Fields) -> CIMultiDict[str]:
    """Return what of an instance's header a client may see, fit for a stream if it is one."""
    passed = _without(fields, _NOT_DOWNSTREAM)
    if is_event_stream(passed):
        # Intermediaries that store or buffer a stream turn tokens into one late lump.
        passed["Cache-Control"] = "no-store"
        passed["X-Accel-Buffering"] = "no"
    return passed


def is_event_stream(fields: _Fields) -> bool:
    """Return whether these fields announce server-sent events."""
    return fields.get("Content-Type", "").lower().startswith("text/event-stream")


def _without(fields: _Fields, dropped: frozenset[str]) -> CIMultiDict[str]:
    named = ",".join(fields.getall("Connection", ())).lower().split(",")
    gone = dropped.union(name.strip() for name in named)
    return CIMultiDict(
        (name, value)
        for name, value in fields.items()
        if name.lower() not in gone and not name.lower().startswith(_CORS_PREFIX)
    )
