"""Errors, events and pings in the format of each API."""

from __future__ import annotations

import json

import pytest

from proxy.errors import QueueFull
from proxy.http.api_formats import format_of

BAD = {"code": 400, "message": "no", "type": "invalid_request_error"}
FULL = {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"


def body(error: object) -> bytes:
    return json.dumps({"error": error}).encode()


@pytest.mark.parametrize(
    ("path", "own", "event", "stream_type"),
    [
        ("/v1/chat/completions", {"error": FULL}, b'data: {"a":1}\n\n', EVENTS),
        ("/completion", {"error": FULL}, b'data: {"a":1}\n\n', EVENTS),
        ("/no/such/path", {"error": FULL}, b'data: {"a":1}\n\n', EVENTS),
        ("/stream/generate", {"error": FULL}, b'event: error\ndata: {"a":1}\n\n', EVENTS),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}},
            b'event: error\ndata: {"a":1}\n\n',
            EVENTS,
        ),
        ("/api/chat", {"error": "full"}, b'{"a":1}\n', LINES),
    ],
)
def test_each_api_has_its_own_errors_and_streams(
    path: str, own: dict[str, object], event: bytes, stream_type: str
) -> None:
    api = format_of(path)
    assert api.own_error(QueueFull("full")) == own
    assert api.error_event(b'{"a":1}') == event
    assert api.stream_type == stream_type
    assert event.endswith(api.piece_end)


def test_a_stream_of_the_responses_api_ends_in_its_own_event() -> None:
    name, data, *_ = format_of("/v1/responses").error_event(body(BAD)).split(b"\n")
    assert name == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    shown = event["type"], event["code"], event["message"], event["sequence_number"]
    assert shown == ("error", "invalid_request_error", "no", 0)


def test_only_anthropics_clients_get_pings_with_a_name() -> None:
    assert format_of("/v1/messages").ping() == b'event: ping\ndata: {"type": "ping"}\n\n'
    assert format_of("/v1/responses").ping() == b":\n\n"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/embeddings",
    ],
)
def test_openais_clients_get_a_string_for_a_code(path: str) -> None:
    body_sent = json.loads(format_of(path).engine_error(400, body(BAD)))
    assert body_sent == {"error": {**BAD, "code": "invalid_request_error", "param": None}}


@pytest.mark.parametrize(
    ("status", "name"), [(400, "invalid_request_error"), (500, "api_error"), (501, "api_error")]
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_clients_get_their_own_plan(path: str, status: int, name: str) -> None:
    body_sent = json.loads(format_of(path).engine_error(status, body(BAD)))
    assert body_sent == {"type": "error", "error": {"type": name, "message": "no"}}


@pytest.mark.parametrize(
    "path", ["/completion", "/infill", "/tokenize", "/props", "/generate", "/stream/generate"]
)
def test_llama_servers_own_clients_get_the_engines_answer(path: str) -> None:
    assert format_of(path).engine_error(400, body(BAD)) == body(BAD)


def test_ollamas_clients_get_a_line_with_the_message() -> None:
    assert format_of("/api/chat").engine_error(400, body(BAD)) == b'{"error":"no"}\n'


@pytest.mark.parametrize(("tokens", "most"), [(5000, 4096), (4096, 4095)])
def test_claude_code_reads_that_a_prompt_is_too_long(tokens: int, most: int) -> None:
    """It compacts only where it finds this sentence."""
    said = {**BAD, "type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": 4096}
    for path, found in (
        ("/v1/messages", f"prompt is too long: {tokens} tokens > {most} maximum"),
        ("/v1/chat/completions", "no"),
    ):
        error = json.loads(format_of(path).engine_error(400, body(said)))["error"]
        assert error["message"] == found
        assert error["n_prompt_tokens"] == tokens
