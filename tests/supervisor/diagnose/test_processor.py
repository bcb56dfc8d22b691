from collections.abc import Iterable
from dataclasses import replace

import pytest

from supervisor.diagnose.host_checks import check_processor
from supervisor.system.processor_load import ProcessorReading

START = ProcessorReading(100, 50, 0, 5, {}, is_low_priority=False)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.diagnose.host_checks.time.sleep", lambda _: None)


def check(**changes: float | None) -> tuple[str, str]:
    """Check with counters that changed within a second."""
    readings = iter([START, replace(START, at_s=101, **changes)])  # type: ignore[arg-type]
    asked = []

    def read(pids: Iterable[int]) -> ProcessorReading:
        asked.append(pids)
        return next(readings)

    found = check_processor([7], read)
    assert asked == [(7,), (7,)]
    return found.level, found.text


def test_a_quiet_machine_is_fine() -> None:
    assert check(busy_s=50.1) == ("ok", "other programs take 0.1 cores")


def test_other_busy_programs_are_a_warning() -> None:
    assert check(busy_s=51.2) == ("warn", "other programs take 1.2 cores")


def test_unknown_load_is_a_warning_unless_pressure_is_known() -> None:
    level, text = check(busy_s=None, stalled_s=None)
    assert level == "warn"
    assert "cannot be read" in text
    assert check(busy_s=None, stalled_s=5.5) == ("ok", "tasks waited 50% of the time")
