"""Engines that break HTTP; all are fakes, as no real one does. 38 to 41."""

from __future__ import annotations

import re
import time
from typing import Final

import psutil
from faults.daemon_under_test import DaemonUnderTest
from faults.fault import Faults, Seen
from faults.pace import since, within
from faults.wire import connect, exchange, request, status, status_and_code

UPSTREAM = Faults()

_LINE_BYTES: Final = 256 << 20
_LISTEN: Final = '[proxy]\nlisten = "127.0.0.1:0"\n'


# Answers that may have no clean end for a client, and odd answers that are complete.
_BROKEN: Final = (
    "no HTTP",
    "HTML",
    "too short",
    "bad chunk",
    "no JSON in it",
    "long header",
)
_WHOLE: Final = ("too long", "hints first")


def _serve(target: DaemonUnderTest, settings: str = "", after: str = "") -> None:
    engine = target.write_engine(f"exec $FAKE --fault obedient={target.root / 'mark'}")
    target.serve({"m": target.models.tiny}, f'engine = "{engine}"\n{_LISTEN}{settings}', after)


def _request(how: str, *, stream: bool) -> bytes:
    """A chat request that the fake engine answers in this way."""
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "m", "user": how, "stream": stream, "messages": messages}
    return request("/v1/chat/completions", body)


def _ask(target: DaemonUnderTest, how: str, *, stream: bool) -> str:
    """Send a request; return how its response ends for the client."""
    answer = exchange(target, _request(how, stream=stream))
    if status(answer) != "200":
        return status_and_code(answer)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    is_whole = len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")
    if b'data: {"error"' in body:
        return "ends in an error event" if not is_whole else "a clean end after an error"
    return "whole" if is_whole else "cut"


def _is_reported(how: str) -> bool:
    return how in {"502 upstream_failed", "ends in an error event", "cut"}


@UPSTREAM.add(38, "engine that dies before its header, or mid-stream", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    _serve(target, after="replicas = 2")
    mark = target.root / "mark"
    mark.touch()
    yield "another answers: whole", f"another answers: {_ask(target, 'dies once', stream=False)}"
    yield "one has died", "one has died" if not mark.exists() else "none has died"
    yield "none answers: 502", f"none answers: {_ask(target, 'hangs up', stream=True)[:3]}"
    end = _ask(target, "cut mid-stream", stream=True)
    yield "mid-stream: ends in an error event", f"mid-stream: {end}"
    end = _ask(target, "cut mid-stream", stream=False)
    yield "mid-stream, without a stream: 502", f"mid-stream, without a stream: {end[:3]}"


@UPSTREAM.add(39, "engine that answers garbage")
def _(target: DaemonUnderTest) -> Seen:
    _serve(target)
    ends = {
        (how, stream): _ask(target, how, stream=stream)
        for how in _BROKEN
        for stream in (True, False)
    }
    silent = {asked: end for asked, end in ends.items() if not _is_reported(end)}
    yield "all are told", "all are told" if not silent else str(silent)
    whole = {_ask(target, how, stream=False) for how in _WHOLE}
    yield "the harmless are whole", "the harmless are whole" if whole == {"whole"} else str(whole)
    daemon = psutil.Process(target.corral.daemon_pid)
    before = daemon.memory_info().rss
    with connect(target) as reader:
        reader.sendall(_request("line without end", stream=True))
        taken_bytes = 0
        while taken_bytes < _LINE_BYTES and (chunk := reader.recv(1 << 20)):
            taken_bytes += len(chunk)
    end = _ask(target, "line without end", stream=False)
    yield "a line without end, assembled: 502", f"a line without end, assembled: {end[:3]}"
    grown_mib = (daemon.memory_info().rss - before) >> 20
    yield "under 64 MiB more", "under 64 MiB more" if grown_mib < 64 else f"{grown_mib} MiB more"


@UPSTREAM.add(40, "engine that closes idle connections silently")
def _(target: DaemonUnderTest) -> Seen:
    _serve(target)
    ends = {_ask(target, "closes quietly", stream=False) for _ in range(20)}
    yield "20 answers are whole", "20 answers are whole" if ends == {"whole"} else str(ends)


@UPSTREAM.add(41, "engine that sends nothing, or nothing more")
def _(target: DaemonUnderTest) -> Seen:
    _serve(target, "upstream_read_timeout_s = 0.5")
    for how, stream, expected in (
        ("says nothing", False, "504 upstream_timeout"),
        ("falls silent", True, "ends in an error event"),
        ("falls silent", False, "504 upstream_timeout"),
    ):
        began_at_s = time.monotonic()
        yield expected, _ask(target, how, stream=stream)
        yield within(3, since(began_at_s))
