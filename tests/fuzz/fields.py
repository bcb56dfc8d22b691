"""Requests with odd header fields, and any method on any endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from fuzz.bodies import PAGES, body
from fuzz.mutate import TEXTS, encode
from fuzz.request import Input, credentials, head

_METHODS: Final = (
    *(
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PROPFIND",
        "get",
    ),
    *("M-SEARCH", "X" * 300, "G\0T", "PRI"),
)
OWN_PAGES: Final = (
    *(
        "/health",
        "/v1/health",
        "/models",
        "/v1/models",
        "/v1/models/m",
        "/slots",
        "/slots/0",
        "/corral/v1/slots",
    ),
    *(
        "/metrics",
        "/props",
        "/corral/v1/models/m/warm",
        "/",
        "//",
        "/v1/models/",
        "/v1/models/%2e%2e",
    ),
    *("/props?model=m", "/props?model=later", "/slots?model=m&model=x", "/slots?fail_on_no_slot=1"),
    *(
        "*",
        "http://localhost/health",
        "/v1/models/%00",
        "/v1/models/" + "a" * 3000,
        "/%ff%fe",
        "/?" + "a=b&" * 900,
    ),
    *(
        "/v1/models/m%0d%0aX-A: 1",
        "/slots/0?action=save",
        "/lora-adapters",
        "/v1/stream?conv_id=c",
        "/../../etc",
    ),
)
_TEXTS: Final = (*TEXTS[:8], *TEXTS[9:], "a" * 64, "a b", '"', "\xe9", "\udcff\udcfe")
# Meaningful values; others are random text.
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "X-Request-Id": (),
    "Origin": ("null", "https://evil.example", "http://localhost:3", "tauri://localhost"),
    "Sec-Fetch-Site": ("cross-site", "same-origin", "none"),
    "Range": ("bytes=0-", "bytes=5-1", "bytes=0-9223372036854775808", "bytes=-"),
    "Expect": ("100-continue", "200-ok"),
    "Prefer": ("wait=0", "wait=1", "wait=-1", "wait=999999", f"wait={'9' * 5000}", "wait=x"),
    "Accept": ("*/*;q=9", "application/openmetrics-text; version=1.0.0"),
    "Accept-Encoding": ("gzip", "br", "identity;q=0"),
    "Content-Type": ("text/plain", "multipart/mixed", "multipart/form-data", "a/b; charset=utf-7"),
    "Content-Encoding": ("gzip", "zstd", "identity", "gzip, gzip"),
    "X-Corral-Priority": ("batch",),
    "X-Corral-Hop": ("1",),
    "X-Conversation-Id": ("c",),
    "X-Session-Id": ("s",),
    "If-Modified-Since": ("Sat, 29 Oct 1994 19:43:31 GMT",),
    "If-Match": ("*",),
    "Cookie": ("a=b; c",),
    "Transfer-Encoding": ("identity", "chunked, chunked", "gzip, chunked"),
    "Forwarded": ("for=127.0.0.1",),
    "Access-Control-Request-Method": ("POST",),
    "X-Long": ("z" * 15_000, "z" * 17_000),
    "X-" + "y" * 300: (),
    "a b": (),
    "": (),
}


def _field(random: Random) -> str:
    name = random.choice(list(_FIELDS))
    values = _FIELDS[name]
    return f"{name}: {random.choice(values if values and random.random() < 0.7 else _TEXTS)}"


def fields(random: Random) -> Input:
    chosen = tuple(_field(random) for _ in range(random.choice((1, 1, 2, 5, 40))))
    host = random.choice(
        ("localhost", "localhost", "127.0.0.1:80", "evil.example", "[::1]", "a b", "")
    )
    if random.random() < 0.5:
        path = random.choice(PAGES)
        content = encode(body(random, path))
        data = head(
            "POST",
            path,
            (*credentials(random), f"Content-Length: {len(content)}", *chosen),
            host=host,
        )
        return Input("fields", (data + content,), leave_after_s=3, is_whole=False)
    data = head(
        random.choice(_METHODS),
        random.choice(OWN_PAGES),
        (*credentials(random), *chosen),
        host=host,
    )
    return Input("fields", (data,), leave_after_s=3, is_whole=False)


def pages(random: Random) -> Input:
    method = random.choice(_METHODS[:10])
    path = random.choice((*PAGES, *OWN_PAGES[:10]))
    content = random.choice((b"", b"{}", b"[]", b"null", b'{"model":"m"}', b"\xff", b'{"model":5}'))
    given = (*credentials(random), f"Content-Length: {len(content)}")
    data = head(method, path, given if content else given[:-1]) + content
    return Input("pages", (data,), is_whole=method in {"GET", "HEAD", "POST", "PUT", "DELETE"})
