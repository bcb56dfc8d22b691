"""HTTP with broken or almost correct framing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from fuzz.bodies import PAGES, body
from fuzz.fields import OWN_PAGES
from fuzz.mutate import INTEGERS, TEXTS, changed_bytes, encode
from fuzz.request import KEY, Input, head, post

_TOKENS: Final = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"HTTP/1.1",
        b"HTTP/9.9",
        b"\x80",
        b"%00",
    ),
    *(b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n", b";"),
)
_LENGTHS: Final = ("+2", "0x2", "2,2", "", "2\uff12")
_KEPT: Final = f"Authorization: Bearer {KEY}"


def framing(random: Random) -> Input:
    if random.random() < 0.5:
        good = _good(random)
        at = good.find(b"\r\n\r\n") + 4
        data = changed_bytes(random, good[:at], _TOKENS) + good[at:]
        if random.random() < 0.3:
            data = changed_bytes(random, good, _TOKENS)
        return Input("framing", (data,), leave_after_s=1.0, is_whole=False)
    data = random.choice(_BROKEN)(random)
    return Input("framing", (data,), leave_after_s=1.0, is_whole=False)


def _good(random: Random) -> bytes:
    if random.random() < 0.3:
        return head("GET", random.choice(OWN_PAGES), (_KEPT,))
    path = random.choice(PAGES)
    return post(path, encode(body(random, path)), (_KEPT,))


def _chunked(random: Random, chunks: bytes, *more: str) -> bytes:
    fields = (_KEPT, "Content-Type: application/json", "Transfer-Encoding: chunked", *more)
    return head("POST", random.choice(PAGES), fields) + chunks


_BROKEN: Final[Sequence[Callable[[Random], bytes]]] = (
    lambda r: _chunked(r, b"zz\r\n{}\r\n0\r\n\r\n"),
    lambda r: _chunked(r, b"-1\r\n{}\r\n0\r\n\r\n"),
    lambda r: _chunked(r, b"2;" + b"x" * r.choice((10, 70_000)) + b"\r\n{}\r\n0\r\n\r\n"),
    lambda r: _chunked(r, b"2\r\n{}0\r\n\r\n"),
    lambda r: _chunked(r, b"2\n{}\n0\n\n"),
    lambda r: _chunked(r, b"fffffffffffffffff\r\n{}"),
    lambda r: _chunked(r, b"7fffffff\r\n{}"),
    lambda r: _chunked(
        r, b"1\r\n{\r\n1\r\n}\r\n0\r\nX-T: " + b"y" * r.choice((1, 20_000)) + b"\r\n\r\n"
    ),
    lambda r: _chunked(r, b"1\r\n \r\n" * r.choice((100, 20_000)) + b"0\r\n\r\n"),
    lambda r: _chunked(r, b"2\r\n{}\r\n0\r\n\r\n", "Content-Length: 2"),
    lambda r: _chunked(r, b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: gzip"),
    lambda r: (
        head("POST", "/tokenize", (_KEPT, f"Transfer-Encoding: {r.choice(TEXTS[:8])}")) + b"{}"
    ),
    lambda _: head("POST", "/tokenize", (_KEPT, "Content-Length: 2", "Content-Length: 3")) + b"{} ",
    lambda r: head("POST", "/tokenize", (_KEPT, f"Content-Length: {r.choice(INTEGERS)}")) + b"{}",
    lambda r: head("POST", "/tokenize", (_KEPT, f"Content-Length: {r.choice(_LENGTHS)}")),
    lambda _: head("POST", "/tokenize", (_KEPT, "Expect: 100-continue", "Content-Length: 2")),
    lambda r: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(300),
    lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0",
    lambda r: r.randbytes(r.choice((1, 100, 20_000))),
    lambda r: b"\r\n" * r.choice((1, 10, 30_000)) + head("GET", "/health"),
    lambda r: (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        + b" folded\r\n" * r.choice((1, 300))
        + b"\r\n"
    ),
    lambda _: head("GET", "/health").replace(b"Connection: close\r\n", b"") * 200,
    lambda r: _good(r).replace(b"Connection: close", b"Connection: keep-alive") * 3,
    lambda r: b"GET " + b"/" + b"a" * r.choice((5_000, 300_000)),
    lambda r: b"GET / HTTP/1.1\r\n" + b"X" * r.choice((9_000, 2_000_000)),
    lambda r: b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * r.choice((200, 200_000)),
    lambda r: b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * r.choice((100, 120)) + b"\r\n",
    lambda _: b"GET / HTTP/1.1\r\n\r\n",
    lambda _: b"GET /health HTTP/1.0\r\n\r\n",
    lambda _: b"GET /health\r\n\r\n",
    lambda _: head(
        "GET",
        "/v1/models",
        (_KEPT, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a"),
    ),
    lambda r: head("GET", "/health", (f"Host: {r.choice(TEXTS)[:50]!a}",)),
)
