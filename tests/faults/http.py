"""Clients with slow, broken or oversized HTTP. 31 to 37."""

from __future__ import annotations

import socket
import struct
import time

import psutil
from faults.daemon_under_test import STREAM_TOKENS, DaemonUnderTest
from faults.fault import Faults, Seen
from faults.pace import since, within
from faults.wire import connect, each, exchange, request, status, status_and_code, summary
from support.corral_cli import until

HTTP = Faults()

_CHAT = "/v1/chat/completions"
_POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_BLANKS = b"10000\r\n" + b" " * 65536 + b"\r\n"
_FIELD = b"X-More: " + b"y" * 8000 + b"\r\n"
_PIECES_MAX = 200_000
_DEPTH = 100_000
_LISTEN = '[proxy]\nlisten = "127.0.0.1:0"\n'


@HTTP.add(31, "header, and body, that come a byte at a time")
def _(target: DaemonUnderTest) -> Seen:
    target.serve(
        {"m": target.models.tiny}, f"{_LISTEN}header_timeout_s = 0.3\nbody_timeout_s = 0.3"
    )
    for raw in (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", _POST + _CHUNKED):
        began_at_s = time.monotonic()
        with connect(target) as slow:
            slow.sendall(raw)
            slow.settimeout(0.05)
            yield "408", status(_dribble(slow, b"1" if raw.startswith(b"GET") else b"1\r\n \r\n"))
        yield within(3, since(began_at_s))
    yield "answered", target.ask("m")


def _dribble(connection: socket.socket, piece: bytes) -> bytes:
    """Send a piece every 50 ms until the response arrives; return it."""
    while True:
        connection.sendall(piece)
        try:
            return connection.recv(65536)
        except TimeoutError:
            continue


def _chat(*, stream: bool, words: int = 1) -> bytes:
    content = "hello " * words
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "stream": stream, "max_tokens": STREAM_TOKENS, "messages": messages}
    return request(_CHAT, body)


@HTTP.add(32, "clients disconnect: in the queue, in prefill, mid-stream, without a stream")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.slow}, after="[models.m.flags]\nparallel = 2")
    other = target.stream("m")
    for name, raw, begun in (
        ("mid-stream", _chat(stream=True), b"data: "),
        ("without a stream", _chat(stream=False), b""),
        ("in prefill", _chat(stream=True, words=3000), b""),
    ):
        with connect(target) as leaver:
            leaver.sendall(raw)
            until(lambda: target.instance("m.0").slots_busy == 2)
            while begun and begun not in leaver.recv(65536):
                pass
        took_s = until(lambda: target.instance("m.0").slots_busy == 1)
        yield within(1.5, took_s, f"{name}: idle")
    second = target.stream("m")
    with connect(target) as waiter:
        waiter.sendall(_chat(stream=True))
    second.close()
    until(lambda: target.instance("m.0").slots_busy == 1)
    yield "in the queue: never began", "in the queue: never began"
    yield "others continue", "others continue" if other.readline() else "others end"
    other.close()


@HTTP.add(33, "client that neither reads nor leaves")
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine("exec $FAKE --fault flood-stream")
    settings = f'engine = "{engine}"\n{_LISTEN}client_write_timeout_s = 1'
    target.serve({"m": target.models.tiny}, settings)
    daemon = psutil.Process(target.corral.daemon_pid)
    before = len(daemon.net_connections("inet"))
    with connect(target) as mute:
        mute.sendall(_chat(stream=True))
        until(lambda: len(daemon.net_connections("inet")) > before)
        took_s = until(lambda: len(daemon.net_connections("inet")) == before)
    yield within(8, took_s, "cut")
    yield "logged as 499", f"logged as {target.events('request.finished')[-1]['status']}"


@HTTP.add(33, "client whose connection is reset")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.slow})
    with connect(target) as broken:
        broken.sendall(_chat(stream=True))
        while b"data: " not in broken.recv(65536):
            pass
        # RST in target of FIN.
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    took_s = until(lambda: not target.instance("m.0").slots_busy)
    yield within(1.5, took_s, "idle")


@HTTP.add(34, "body over the limit: announced, and not", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny}, f"{_LISTEN}max_body_bytes = 100000")
    daemon = psutil.Process(target.corral.daemon_pid)
    before = daemon.memory_info().rss
    gigabyte = _POST + b"Content-Length: 1000000000\r\n\r\n"
    yield (
        "announced: 413 body_too_large",
        f"announced: {status_and_code(exchange(target, gigabyte))}",
    )
    with connect(target) as endless:
        endless.sendall(_POST + _CHUNKED)
        yield "without end: ended", f"without end: {_pour(endless, _BLANKS)}"
    grown_mib = (daemon.memory_info().rss - before) >> 20
    yield "under 8 MiB more", "under 8 MiB more" if grown_mib < 8 else f"{grown_mib} MiB more"
    yield "answered", target.ask("m")


def _pour(connection: socket.socket, piece: bytes) -> str:
    """Send without end; return when the other side closes."""
    for _ in range(_PIECES_MAX):
        try:
            connection.sendall(piece)
        except ConnectionError:
            return "ended"
    return "it takes anything"


def _body(raw: bytes) -> bytes:
    return request("/tokenize", raw)


@HTTP.add(35, "bodies that are no JSON")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    answers = each(
        target,
        {
            "cut short": _body(b'{"content": '),
            "NaN": _body(b'{"content": NaN}'),
            "no UTF-8": _body(b'{"content": "\xff"}'),
            "half a surrogate": _body(b'{"content": "\\ud800"}'),
            "no object": _body(b"[]"),
            "empty": _body(b""),
        },
    )
    yield "all 400 invalid_request", summary(answers)
    deep = each(
        target,
        {
            "deep": _body(b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH),
            "deep, and rewritten": _body(b'{"id_slot":0,"a":' + b"[" * 900 + b"]" * 900 + b"}"),
        },
    )
    yield "all 400 body_too_complex", summary(deep)
    twice = _body(b'{"content": "a", "content": "abc", "model": "x", "model": "m"}')
    yield (
        "of a member twice the last counts",
        (
            "of a member twice the last counts"
            if status(exchange(target, twice)) == "200"
            else "refused"
        ),
    )
    yield "answered", target.ask("m")


@HTTP.add(36, "requests that two readers might cut in two ways")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    cases = {
        "both framings": _POST + b"Content-Length: 5\r\n" + _CHUNKED + b"0\r\n\r\n" + inner,
        "two lengths": _POST + b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}" + inner,
        "a list of lengths": _POST + b"Content-Length: 2, 2\r\n\r\n{}",
        "coding twice": _POST + b"Transfer-Encoding: x\r\n" + _CHUNKED + b"0\r\n\r\n",
        "no CR": b"GET /health HTTP/1.1\nHost: localhost\n\n",
        "a folded field": _GET + b"X: a\r\n b\r\n\r\n",
        "a space before the colon": _GET + b"X : a\r\n\r\n",
        "bad chunk size": _POST + _CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
        "chunk without CR": _POST + _CHUNKED + b"2\n{}\n0\n\n",
        "NUL in a field": _GET + b"X: a\0b\r\n\r\n",
        "NUL in the path": b"GET /heal\0th HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "two hosts": _GET + b"Host: evil.example\r\n\r\n",
    }
    yield "all 400 invalid_request", summary(each(target, cases))
    extended = _POST + _CHUNKED + b'f;a="b"\r\n{"content":"a"}\r\n0\r\nX-Trailer: 1\r\n\r\n'
    yield "an extended chunk: 200", f"an extended chunk: {status(exchange(target, extended))}"
    log = (target.root / "log" / "daemon.log").read_text("utf-8")
    yield "no traceback", "no traceback" if "Traceback" not in log else "traceback"
    yield "answered", target.ask("m")


@HTTP.add(37, "floods of header")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    cases = {
        "many": _GET + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n",
        "long": _GET + b"X: " + b"y" * 30_000 + b"\r\n\r\n",
        "long path": b"GET /" + b"y" * 30_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    }
    yield "all 431 header_too_large", summary(each(target, cases))
    with connect(target) as endless:
        endless.sendall(_GET)
        yield "without end: ended", f"without end: {_pour(endless, _FIELD)}"
    yield "answered", target.ask("m")
