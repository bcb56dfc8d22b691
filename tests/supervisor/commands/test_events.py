import io
from datetime import datetime

import pytest

from supervisor.commands.events import describe
from supervisor.control.messages import EventLine
from supervisor.output import write

AT = datetime(2026, 11, 21, 9, 0, 1, 250_000).astimezone()


def event(level: str = "info", **fields: object) -> EventLine:
    return {"name": "daemon.stopping", "level": level, "at": AT.isoformat(), "fields": fields}


def test_an_event_is_one_line_of_time_name_and_fields() -> None:
    assert describe(event(reason="test", run=1)) == (
        "09:00:01.250 daemon.stopping     reason=test run=1"
    )


def test_what_is_unknown_is_left_out() -> None:
    assert describe(event(reason=None)) == "09:00:01.250 daemon.stopping"


@pytest.mark.parametrize("text", ["two words", "two\nlines", "\x1b[31mred", ""])
def test_a_field_that_is_no_word_is_quoted(text: str) -> None:
    line = describe(event(reason=text))
    assert "\n" not in line
    assert "\x1b" not in line
    assert 'reason="' in line


@pytest.mark.parametrize(("level", "colour"), [("warning", "33"), ("error", "31")])
def test_what_matters_is_coloured(monkeypatch: pytest.MonkeyPatch, level: str, colour: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    write(describe(event(level)), stream)
    assert f"\x1b[{colour}m" in stream.getvalue()
