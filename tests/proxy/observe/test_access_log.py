"""The record of a request."""

import time
from typing import Any

import pytest

from proxy.errors import ProxyError, QueueFull, UpstreamFailed
from proxy.observe.record import AccessRecord, LoadCause, Timeline
from proxy.upstream.upstream import Timings
from supervisor.events import EVENTS

Told = dict[str, dict[str, Any]]


def hear(emitted: Told) -> Any:
    return lambda name, /, **fields: emitted.update({name: fields})


def event_of(record: AccessRecord, rejected_by: ProxyError | None = None) -> Told:
    told: dict[str, Any] = {}
    record.emit(told.__setitem__, rejected_by)
    return told


def test_events_have_the_fields_of_the_table() -> None:
    emitted: Told = {}
    record = AccessRecord("r", Timeline())
    record.model, record.timeline.load_cause = "chat", LoadCause("large", 34_000.0)
    emitted.update(event_of(record, QueueFull("no place")))
    record.set_instance("chat.1")
    record.emit_upstream_failure(hear(emitted), UpstreamFailed("broke"))
    emitted.update(event_of(record))
    assert len(emitted) == 3
    for name, fields in emitted.items():
        assert sorted(fields) == sorted(EVENTS[name][1])


def test_a_retried_request_is_one_record() -> None:
    emitted: Told = {}
    record = AccessRecord("r", Timeline())
    record.model = "chat"
    record.set_instance("chat.1", expected_cached=40)
    record.set_instance("chat.2", expected_cached=30)
    record.timings = Timings(28, 12, 60.0, 11, 500.0, 8, 6)
    emitted.update(event_of(record))
    event = emitted["request.finished"]
    assert (event["instance"], event["attempts"]) == ("chat.2", 2)
    assert (event["expected_cached_tokens"], event["cached_tokens"]) == (30, 28)
    assert (event["prompt_tokens"], event["decoded_tokens"]) == (12, 11)
    assert (event["engine_prefill_ms"], event["engine_decode_ms"]) == (60, 500)
    assert (event["drafted_tokens"], event["accepted_tokens"]) == (8, 6)


def test_the_first_byte_is_never_later_than_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter((100.0, 100.00049, 100.00049))
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    emitted: Told = {}
    record = AccessRecord("r", Timeline())
    record.model = "chat"
    record.set_instance("chat.1")
    record.count(b"x")
    emitted.update(event_of(record))
    event = emitted["request.finished"]
    assert event["first_byte_ms"] == event["duration_ms"] == 0.4


def test_only_the_first_token_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter((100.0, 100.5, 101.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    emitted: Told = {}
    record = AccessRecord("r", Timeline())
    record.model = "chat"
    record.timeline.note_token()
    record.timeline.note_token()
    emitted.update(event_of(record))
    assert emitted["request.finished"]["first_token_ms"] == 500


def test_the_first_byte_is_timed_once_and_all_bytes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s = iter((100.0, 100.25, 101.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    record = AccessRecord("r", Timeline())
    record.model = "chat"
    record.count(b"four")
    record.count(b"four")
    emitted = event_of(record)["request.finished"]
    assert (emitted["first_byte_ms"], emitted["duration_ms"], emitted["bytes_out"]) == (
        250,
        1000,
        8,
    )


def test_a_clients_text_is_bounded_and_escaped_in_the_log() -> None:
    emitted: Told = {}
    record = AccessRecord("r", Timeline())
    record.model = record.path = "chat\n" + "x" * 10_000
    text = "there is no \x1b[31mmodel\r\n" + "y" * 10_000
    emitted.update(event_of(record, QueueFull(text)))
    record.emit_upstream_failure(hear(emitted), UpstreamFailed(text))
    rejected, failed = emitted["request.rejected"], emitted["upstream.failed"]
    for shown in (
        *(rejected[name] for name in ("model", "path", "reason")),
        *(failed[name] for name in ("model", "error")),
    ):
        assert len(shown) < 500
        assert shown.isprintable()
        assert shown.endswith("…")
