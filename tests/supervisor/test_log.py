import io
import json
import logging
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pytest

from proxy.common.background_tasks import FAILURES, FailureHandler
from supervisor.events import Event, EventStream
from supervisor.log import (
    Sink,
    console_sink,
    is_journal,
    journal_entry,
    journal_sink,
    json_sink,
    stream_sink,
)

AT = datetime(2026, 11, 21, 9, tzinfo=UTC)
STOPPING = Event("daemon.stopping", AT, {"reason": "SIGTERM received"})
EVIL = "\x1b[2J\x9b1m\x7f\u202e\nforged"
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


def test_json_has_time_level_name_and_known_fields() -> None:
    (line,) = said(json_sink, exited(None))
    assert json.loads(line) == {
        "timestamp": "2026-11-21T09:00:00.000+00:00",
        "level": "info",
        "event": "instance.exited",
        "instance": "a.0",
        "fault": False,
    }


def test_json_accepts_a_path_that_is_not_utf_8() -> None:
    (line,) = said(json_sink, Event("settings.rejected", AT, {"reason": Path("caf\udce9")}))
    assert json.loads(line)["reason"] == "caf\udce9"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (STOPPING, '<6>daemon.stopping reason="SIGTERM received"'),
        (exited(1), "<4>instance.exited instance=a.0 code=1 fault=True"),
        (Event("instance.failed", AT, {"failures": 5}), "<3>instance.failed failures=5"),
        (Event("daemon.stopped", AT, {}), "<6>daemon.stopped"),
    ],
)
def test_the_journal_gets_a_priority_and_no_time(event: Event, line: str) -> None:
    assert said(journal_sink, event) == [line]


def test_a_field_of_two_lines_stays_one_line_in_the_journal() -> None:
    (line,) = said(journal_sink, Event("daemon.stopping", AT, {"reason": "one\n<0>two"}))
    assert "\n" not in line


@pytest.mark.parametrize("make", [json_sink, journal_sink])
def test_load_progress_is_not_logged(make: Callable[[Callable[[str], None]], Sink]) -> None:
    assert said(make, PROGRESSED) == []


def test_a_stream_is_the_journal_only_if_device_and_inode_match(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as ours, (tmp_path / "b").open("w") as other:
        assert is_journal(ours, journal_of(ours))
        assert not is_journal(other, journal_of(ours))
        assert not is_journal(ours, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_the_kind_of_stream_decides_the_format(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+", encoding="utf-8") as file:
        stream_sink(file, journal_of(file), tmp_path / "no journal")(STOPPING)
        stream_sink(file, {})(STOPPING)
        file.seek(0)
        journal, plain = file.readlines()
    terminal = Terminal()
    stream_sink(terminal, {})(STOPPING)
    assert journal.startswith("<6>daemon.stopping")
    assert json.loads(plain)["event"] == "daemon.stopping"
    assert "daemon.stopping" in terminal.getvalue()
    assert "{" not in terminal.getvalue()


def test_the_journal_itself_gets_fields(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
        (tmp_path / "log").open("w+", encoding="utf-8") as file,
    ):
        journal.bind(str(path))
        log = stream_sink(file, journal_of(file), path)
        for event in (PROGRESSED, exited(1)):
            log(event)
        entry = journal.recv(64 * 1024)
        file.seek(0)
        assert file.read() == ""
    assert entry == journal_entry(exited(1))


@pytest.mark.parametrize("make", [json_sink, journal_sink])
def test_no_format_passes_control_characters_of_a_client(
    make: Callable[[Callable[[str], None]], Sink],
) -> None:
    (line,) = said(make, Event("request.rejected", AT, {"model": EVIL}))
    assert line.isprintable()


def test_a_terminal_gets_the_line_of_corral_events_without_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    console_sink(terminal)(Event("request.rejected", AT, {"model": EVIL}))
    line = terminal.getvalue().removesuffix("\n")
    assert line.isprintable()
    assert "request.rejected" in line


def test_a_field_named_like_a_key_of_the_log_does_not_replace_it() -> None:
    fields = {"event": "request.rejected", "cause": "no_key", "count": 7}
    (line,) = said(json_sink, Event("events.withheld", AT, fields))
    entry = json.loads(line)
    assert (entry["event"], entry["field_event"]) == ("events.withheld", "request.rejected")


def test_a_record_of_a_library_is_logged_as_an_event() -> None:
    lines: list[str] = []
    FAILURES.report_to(EventStream(json_sink(lines.append)).emit)
    record = logging.makeLogRecord(
        {"name": "aiohttp.server", "levelno": logging.WARNING, "msg": "odd %s", "args": ("peer",)}
    )
    FailureHandler().emit(record)
    entry = json.loads(lines[0])
    assert (entry["event"], entry["task"], entry["error"]) == (
        "task.failed",
        "aiohttp.server",
        "odd peer",
    )
