"""Times of day in which no model uses a device."""

from datetime import datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from supervisor.settings.tables import DeviceSettings

HERE = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("hours", "now", "end"),
    [
        ("22:00-07:00", "2026-11-28T21:59:59", None),
        ("22:00-07:00", "2026-11-28T22:00:00", "2026-11-29T07:00:00"),
        ("22:00-07:00", "2026-11-29T00:00:00", "2026-11-29T07:00:00"),
        ("22:00-07:00", "2026-11-29T07:00:00", None),
        ("09:00-17:30", "2026-11-28T17:29:00", "2026-11-28T17:30:00"),
        ("09:00-17:30", "2026-11-28T17:30:00", None),
        ("00:00-00:01", "2026-11-28T00:00:00", "2026-11-28T00:01:00"),
        (None, "2026-11-28T22:00:00", None),
    ],
)
def test_they_end_at_a_local_time(hours: str | None, now: str, end: str | None) -> None:
    found = DeviceSettings(quiet_hours=hours).quiet_until(
        datetime.fromisoformat(now).replace(tzinfo=HERE)
    )
    assert found == (datetime.fromisoformat(end).replace(tzinfo=HERE) if end else None)


@pytest.mark.parametrize(
    "hours", ["", "22-7", "22:00-24:00", "7:00-08:00", "07:00-07:00", "always"]
)
def test_other_texts_are_refused(hours: str) -> None:
    with pytest.raises(ValidationError, match='two different times of day, as in "22:00-07:00"'):
        DeviceSettings(quiet_hours=hours)
