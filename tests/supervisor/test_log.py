import io
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pytest

from supervisor.events import Event
from supervisor.log import Sink, is_journal, to_journal, to_json, to_stream, to_terminal

AT = datetime(2026, 11, 21, 9, tzinfo=UTC)
STOPPING = Event("daemon.stopping", AT, {"reason": "SIGTERM received"})
PROGRESSED = Event("instance.load_progress", AT, {"instance": "a.0"})


def exited(code: int | None) -> Event:
    fields = {"instance": "a.0", "code": code, "signal": None, "fault": code is not None}
    return Event("instance.exited", AT, fields)


def said(make: Callable[[Callable[[str], None]], Sink], *events: Event) -> list[str]:
    lines: list[str] = []
    sink = make(lines.append)
    for event in events:
        sink(event)
    return lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def journal_of(file: TextIO) -> dict[str, str]:
    found = os.fstat(file.fileno())
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


def test_json_has_time_level_name_and_the_fields_that_are_known() -> None:
    (line,) = said(to_json, exited(None))
    assert json.loads(line) == {
        "timestamp": "2026-11-21T09:00:00.000+00:00",
        "level": "info",
        "event": "instance.exited",
        "instance": "a.0",
        "fault": False,
    }


def test_json_takes_a_path_that_is_no_text() -> None:
    (line,) = said(to_json, Event("settings.rejected", AT, {"reason": Path("caf\udce9")}))
    assert json.loads(line)["reason"] == "caf\udce9"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (STOPPING, '<6>daemon.stopping reason="SIGTERM received"\n'),
        (exited(1), "<4>instance.exited instance=a.0 code=1 fault=True\n"),
        (Event("instance.failed", AT, {"failures": 5}), "<3>instance.failed failures=5\n"),
        (Event("daemon.stopped", AT, {}), "<6>daemon.stopped\n"),
    ],
)
def test_the_journal_gets_a_priority_and_no_time(event: Event, line: str) -> None:
    assert said(to_journal, event) == [line]


def test_a_field_of_two_lines_stays_one_line_in_the_journal() -> None:
    (line,) = said(to_journal, Event("daemon.stopping", AT, {"reason": "one\n<0>two"}))
    assert line.count("\n") == 1


@pytest.mark.parametrize("make", [to_json, to_journal])
def test_load_progress_is_not_logged(make: Callable[[Callable[[str], None]], Sink]) -> None:
    assert said(make, PROGRESSED) == []


def test_a_stream_is_the_journal_only_if_it_is_the_very_file(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as ours, (tmp_path / "b").open("w") as other:
        assert is_journal(ours, journal_of(ours))
        assert not is_journal(other, journal_of(ours))
        assert not is_journal(ours, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_who_reads_the_stream_decides_its_form(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+", encoding="utf-8") as file:
        to_stream(file, journal_of(file))(STOPPING)
        to_stream(file, {})(STOPPING)
        file.seek(0)
        journal, plain = file.readlines()
    terminal = Terminal()
    to_stream(terminal, {})(STOPPING)
    assert journal.startswith("<6>daemon.stopping")
    assert json.loads(plain)["event"] == "daemon.stopping"
    assert "daemon.stopping" in terminal.getvalue()
    assert "{" not in terminal.getvalue()


def test_no_sink_lets_words_of_a_client_command_a_terminal() -> None:
    evil = "\x1b[2J\x9b1m\x7f\u202e\nforged"
    refused = Event("request.rejected", AT, {"model": evil})
    makers = (to_json, to_journal, lambda write: to_terminal(write, colours=False))
    for make in makers:
        (line,) = said(make, refused)
        assert line.removesuffix("\n").isprintable()
