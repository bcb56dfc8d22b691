"""HTTP by hand: every byte sent is in the test."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from faults.daemon_under_test import DaemonUnderTest
from support.corral_cli import PATIENCE_S


def connect(target: DaemonUnderTest) -> socket.socket:
    host, _, port = target.client.status().url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def request(
    path: str, body: bytes | Mapping[str, Any] | None = None, *fields: str, host: str = "localhost"
) -> bytes:
    """Return a request, the last of its connection; a body makes it a POST."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
    method = "GET" if body is None else "POST"
    length = () if body is None else (f"Content-Length: {len(content)}",)
    head = (f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *length, *fields)
    return "\r\n".join((*head, "", "")).encode("latin-1") + content


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    got = bytearray()
    while chunk := connection.recv(65536):
        got += chunk
    return bytes(got)


def exchange(target: DaemonUnderTest, raw: bytes) -> bytes:
    """Send bytes on a connection of their own; return all that is received."""
    with connect(target) as connection:
        connection.sendall(raw)
        return read_all(connection)


def status(answer: bytes) -> str:
    """The status of a response, or a text if there is none."""
    line = answer.partition(b"\r\n")[0].split()
    return line[1].decode() if len(line) > 1 else "closed without an answer"


def status_and_code(answer: bytes) -> str:
    """The status and, if the error has OpenAI's format, its code."""
    try:
        code = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return status(answer)
    return f"{status(answer)} {code}"


def each(target: DaemonUnderTest, cases: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Send each; return the names of the cases by response."""
    by_answer: dict[str, list[str]] = {}
    for name, raw in cases.items():
        by_answer.setdefault(status_and_code(exchange(target, raw)), []).append(name)
    return by_answer


def summary(by_answer: Mapping[str, list[str]]) -> str:
    """One response if all cases got the same, otherwise each with its cases."""
    if len(by_answer) == 1:
        return f"all {next(iter(by_answer))}"
    return "; ".join(f"{answer}: {', '.join(names)}" for answer, names in by_answer.items())
