"""What is remembered of a request."""

import time
from typing import Any

import pytest

from proxy.record import Record


def test_the_first_byte_is_timed_once_and_all_bytes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s = iter((100.0, 100.25, 101.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times_s))
    record = Record("r")
    record.model = "chat"
    told: dict[str, Any] = {}
    record.count(b"four")
    record.count(b"four")
    record.tell(lambda _, /, **fields: told.update(fields), None)
    assert (told["first_byte_ms"], told["took_ms"], told["bytes_out"]) == (250, 1000, 8)
