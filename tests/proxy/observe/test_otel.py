"""The attributes of a request's span, from its figures alone."""

from __future__ import annotations

from typing import Any

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from proxy.observe.otel import attributes, is_error, method_of, phases, span_name
from supervisor.events import EVENTS

FINISHED: dict[str, Any] = {
    "request": "r",
    "client": "ada",
    "path": "/v1/chat/completions",
    "model": "chat",
    "fallback_for": None,
    "instance": "chat.0",
    "slot": 0,
    "kind": "chat",
    "streamed": True,
    "priority": "interactive",
    "status": 200,
    "code": None,
    "cancelled": None,
    "attempts": 1,
    "prompt_tokens": 12,
    "cached_tokens": 30,
    "decoded_tokens": 7,
    "first_token_ms": 700.0,
    "duration_ms": 1000.0,
    "queued_ms": 100.0,
    "evict_ms": 0.0,
    "load_ms": 400.0,
    "slots_ms": 0.0,
    "prefill_ms": 150.0,
    "decode_ms": 200.0,
    "stalled_ms": 50.0,
    "other_ms": 100.0,
}


def test_attributes_follow_the_conventions() -> None:
    assert span_name("POST", FINISHED) == "POST /v1/chat/completions"
    assert attributes(FINISHED) == {
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "llama.cpp",
        "gen_ai.request.model": "chat",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "chat",
        "gen_ai.response.time_to_first_chunk": 0.7,
        "gen_ai.usage.cache_read.input_tokens": 30,
        "gen_ai.usage.input_tokens": 42,
        "gen_ai.usage.output_tokens": 7,
        "corral.attempts": 1,
        "corral.client": "ada",
        "corral.instance": "chat.0",
        "corral.priority": "interactive",
        "corral.request.id": "r",
        "corral.slot": 0,
        "corral.stalled_ms": 50.0,
    }


def test_names_are_those_of_the_events_and_of_the_conventions() -> None:
    assert FINISHED.keys() <= set(EVENTS["request.finished"][1])
    tables = (error_attributes, gen_ai_attributes, http_attributes)
    known = {value for table in tables for value in vars(table).values() if isinstance(value, str)}
    found = attributes({**FINISHED, "code": "upstream_failed"})
    assert {name for name in found if not name.startswith("corral.")} <= known


def test_phases_lead_up_to_the_first_token_and_on_from_it() -> None:
    assert list(phases(FINISHED)) == [
        ("queue", 50, 150),
        ("load", 150, 550),
        ("prefill", 550, 700),
        ("decode", 700, 950),
    ]


def test_phases_stay_within_the_request() -> None:
    whole = {**FINISHED, "first_token_ms": 1000.0}  # its text came all at once
    assert max(end_ms for _, _, end_ms in phases(whole)) == 1000
    queued = {**FINISHED, **dict.fromkeys(("load_ms", "prefill_ms", "decode_ms"), 0.0)}
    assert list(phases(queued)) == [("queue", 0, 100)]


def test_a_rejected_request_has_its_known_attributes() -> None:
    rejected = {"request": "r", "model": None, "client": None, "path": None, "status": 503}
    assert span_name(method_of("FROBNICATE"), rejected) == "HTTP"
    found = attributes({**rejected, "code": "queue_full"})
    assert found["error.type"] == "queue_full"
    assert is_error(rejected)
    assert not is_error({"status": 404})
