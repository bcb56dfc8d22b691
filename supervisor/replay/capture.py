"""Reads a capture: what of it can be played again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from proxy.endpoints import EndpointKind
from proxy.upstream.timings import Timings
from supervisor.capture.lines import FORMAT
from supervisor.errors import CaptureInvalid
from supervisor.host.files import open_regular

_LINE_MAX_BYTES: Final = 64 * 1024**2
_REQUESTS_MAX: Final = 10_000
_PLAYED: Final = frozenset(
    {
        EndpointKind.CHAT,
        EndpointKind.COMPLETION,
        EndpointKind.LLAMA_COMPLETION,
        EndpointKind.MESSAGES,
        EndpointKind.RESPONSES,
    }
)
_KINDS: Final = {kind.name.lower(): kind for kind in _PLAYED}


@dataclass(frozen=True, slots=True)
class CapturedResponse:
    """`wait_ms`: before a slot was free and the model loaded."""

    status: int | None
    is_stream: bool
    body: str
    end_ms: float
    first_token_ms: float | None
    wait_ms: float
    timings: Timings | None
    failure: str | None

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.failure is None


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """`response` is None where the capture ended before it."""

    number: int
    at_ms: float
    kind: EndpointKind
    path: str
    body: Mapping[str, Any]
    response: CapturedResponse | None


@dataclass(frozen=True, slots=True)
class Capture:
    """`skipped`: how many requests of each kind cannot be played."""

    model: str
    header: Mapping[str, Any]
    requests: tuple[CapturedRequest, ...]
    skipped: Mapping[str, int]


def read(path: Path) -> Capture:
    """Read a file, which may be cut off in a line.

    Raises:
        CaptureInvalid: It is no capture, of another format, or nothing in it can be played.
    """
    lines = _lines(path)
    header = next(lines, {})
    if header.get("type") != "capture" or not isinstance(header.get("model"), str):
        raise CaptureInvalid(f"{path} is no capture", hint="corral capture --model M makes one")
    if header.get("format") != FORMAT:
        raise CaptureInvalid(f"{path} has format {header.get('format')}, and {FORMAT} is known")
    found: dict[int, Mapping[str, Any]] = {}
    responses: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if line.get("type") == "request" and len(found) < _REQUESTS_MAX:
            found[int(line.get("n", 0))] = line
        elif line.get("type") == "response" and line.get("n") in found:
            responses[line["n"]] = line
    played = {n: line for n, line in found.items() if _is_played(line)}
    skipped = Counter(str(line.get("kind")) for n, line in found.items() if n not in played)
    if not played:
        raise CaptureInvalid(f"{path} has no request that can be played: {_counts(skipped)}")
    try:
        requests = tuple(_request(line, responses.get(n)) for n, line in played.items())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CaptureInvalid(f"{path} has a line that cannot be read: {error!r}") from error
    return Capture(header["model"], header, requests, skipped)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            while line := file.readline(_LINE_MAX_BYTES):
                try:
                    found = orjson.loads(line)
                except orjson.JSONDecodeError:
                    return  # the last one may be cut off
                yield found if isinstance(found, dict) else {}
    except OSError as error:
        raise CaptureInvalid(f"cannot read {path}: {error.strerror}") from error


def _is_played(line: Mapping[str, Any]) -> bool:
    body = line.get("body")
    has_one = isinstance(body, dict) and all(body.get(key) in {None, 1} for key in ("n", "n_cmpl"))
    return has_one and line.get("kind") in _KINDS


def _request(line: Mapping[str, Any], response: Mapping[str, Any] | None) -> CapturedRequest:
    return CapturedRequest(
        line["n"],
        line["at_ms"],
        _KINDS[line["kind"]],
        line["path"],
        line["body"],
        _response(response) if response else None,
    )


def _response(line: Mapping[str, Any]) -> CapturedResponse:
    timings, times = line.get("timings"), line.get("times_ms") or {}
    return CapturedResponse(
        status=line.get("status"),
        is_stream=str(line.get("content_type")).startswith("text/event-stream"),
        body="".join(text for _, text in line["chunks"]),
        end_ms=line["end_ms"],
        first_token_ms=line.get("first_token_ms"),
        wait_ms=sum(times.get(name, 0.0) for name in ("queued_ms", "evict_ms", "load_ms")),
        timings=Timings(**timings) if timings else None,
        failure=line.get("failure"),
    )


def _counts(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of kind {kind}" for kind, count in skipped.items()) or "it has none"
