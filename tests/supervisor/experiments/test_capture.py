"""The requests of a capture that can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from supervisor.errors import CaptureInvalid
from supervisor.experiments.capture_lines import read, recorded_text

HEAD = {"type": "capture", "format": 1, "model": "chat"}
BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHUNK = (
    'data: {{"choices":[{{"index":0,"finish_reason":{reason},"delta":{{"content":"{text}"}}}}]}}'
    "\n\n"
)


def request(n: int, **changes: Any) -> dict[str, Any]:
    line = {"type": "request", "n": n, "at_ms": 10.0 * n, "kind": "chat", "path": "/v1/chat"}
    return {**line, "body": BODY, **changes}


def response(n: int, *texts: str, **changes: Any) -> dict[str, Any]:
    line = {"type": "response", "n": n, "status": 200, "content_type": "text/event-stream"}
    return {
        **line,
        "end_ms": 10.0 * n + 5,
        "chunks": [[10.0 * n, text] for text in texts],
        "first_token_ms": 4.0,
        "times_ms": {"queued_ms": 1.0, "load_ms": 2.0},
        "timings": None,
        "failure": None,
        **changes,
    }


def write(path: Path, *lines: dict[str, Any], rest: bytes = b"") -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + rest)
    return path


def test_requests_come_with_their_responses(tmp_path: Path) -> None:
    texts = [CHUNK.format(reason="null", text="he"), CHUNK.format(reason='"stop"', text="llo")]
    others = [request(2, kind="embed_or_rerank"), request(3), request(4, body={**BODY, "n": 2})]
    lines = [HEAD, request(1), response(1, *texts), *others]
    found = read(write(tmp_path / "a", *lines, rest=b'{"type":"response","n":3,"sta'))
    first, last = found.requests
    assert (first.number, recorded_text(first)) == (1, "hello")
    assert first.response
    assert first.response.wait_ms == 3.0
    assert (last.number, last.response, recorded_text(last)) == (3, None, None)
    assert found.skipped == {"embed_or_rerank": 1, "chat": 1}


@pytest.mark.parametrize(
    "changes",
    [{"failure": "the client left"}, {"status": 500}, {"chunks": [[1, "data: {}\n\n"]]}],
)
def test_an_answer_that_is_not_whole_has_no_text(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path / "a", HEAD, request(1), response(1, **changes))
    assert recorded_text(read(path).requests[0]) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"type": "x"}], "is no capture"),
        ([{**HEAD, "format": 2}], "has format 2"),
        ([HEAD], "it has none"),
        ([HEAD, request(1, body=None)], "1 of kind chat"),
        ([HEAD, request(1), {"type": "response", "n": 1}], "cannot be read"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, lines: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(CaptureInvalid, match=reason):
        read(write(tmp_path / "a", *lines))
