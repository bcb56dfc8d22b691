"""Requests that have ended, as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.requests import request_lines, request_rows, since_of
from supervisor.cli.targets import complete_word
from supervisor.errors import SettingsInvalid
from supervisor.events import EVENTS, Event
from supervisor.records.requests import FIGURES, insert, row_of
from supervisor.records.store import RecordStore
from supervisor.system.paths import directories

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
ENDED: dict[str, Any] = {
    **dict.fromkeys(FIGURES),
    "id": "req_1",
    "ended_at": NOW.isoformat(),
    "model": "chat",
    "instance": "chat.0",
    "slot": 0,
    "client": "laptop",
    "path": "/v1/chat/completions",
    "status": 200,
    "duration_ms": 2000.0,
    "queued_ms": 0.0,
    "evict_ms": 250.0,
    "load_ms": 750.0,
    "prefill_ms": 400.0,
    "decode_ms": 500.0,
    "stalled_ms": 0.0,
    "other_ms": 100.0,
    "first_token_ms": 1400.0,
    "prompt_tokens": 30,
    "cached_tokens": 10,
    "expected_cached_tokens": 40,
    "decoded_tokens": 41,
    "engine_decode_ms": 400.0,
}
REJECTED: dict[str, Any] = {
    **dict.fromkeys(ENDED),
    "id": "req_2",
    "ended_at": NOW.isoformat(),
    "status": 429,
    "code": "queue_full",
    "duration_ms": 0.4,
}


def test_the_timeline_is_a_line_for_each_phase() -> None:
    lines = request_lines(ENDED).splitlines()
    assert lines[0].startswith("req_1: 200 after 2.00 s, ended 2026-11-22 ")
    assert "instance=chat.0  slot=0  client=laptop" in lines[1]
    assert [line.split("  ")[0] for line in lines[3:10]] == [
        "queued",
        "waiting for memory",
        "loading the model",
        "prefill",
        "decode",
        "client not reading",
        "other",
    ]
    assert lines[5].split() == ["loading", "the", "model", "750", "ms", "█" * 9]
    assert lines[6].endswith("30 tokens computed, 10 from the cache (40 expected)")
    assert lines[7].endswith("41 tokens, 100.0/s")


def test_a_table_also_shows_requests_that_reached_no_model() -> None:
    _, first, second = request_rows([ENDED, REJECTED]).splitlines()
    assert " ".join(first.split()).endswith("200 2.00 s 1.00 s 1.40 s 40 10 41 100.0")
    assert "429 queue_full" in second
    assert request_lines(REJECTED).startswith("req_2: 429 queue_full after 0.4 ms")


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("90s", 90), ("1.5h", 5400), ("2d", 172_800), ("2026-11-22T11:59:00+00:00", 60)],
)
def test_since_is_an_age_or_a_date(text: str, ago_s: float) -> None:
    assert since_of(text, NOW) == NOW.timestamp() - ago_s


@pytest.mark.parametrize("text", ["", "yesterday", "-1h", "1y", "12:00"])
def test_another_since_is_refused(text: str) -> None:
    with pytest.raises(SettingsInvalid):
        since_of(text, NOW)


def test_ids_are_offered_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path / name))
    assert complete_word("any request", "") == []
    finished = dict.fromkeys(EVENTS["request.finished"][1])
    row = row_of(Event("request.finished", NOW, finished | {"request": "req_1"}), 1)
    store = RecordStore(directories().data)
    store.run(lambda connection: insert(connection, *row))
    store.close()
    assert complete_word("any request", "req_") == ["req_1"]


def test_where_the_engine_reports_tokens_alone_the_rate_is_that_of_the_proxys_clock() -> None:
    for unknown in (None, 0.0):  # older versions stored 0
        text = request_lines({**ENDED, "engine_prefill_ms": unknown, "engine_decode_ms": unknown})
        assert "41 tokens, 80.0/s" in text
        assert "the engine's own prefill" not in text
