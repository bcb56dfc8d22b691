import io
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from supervisor.events import EVENTS, Event, EventStream, Listener, describe
from supervisor.output import write

ROOT = Path(__file__).parent.parent.parent
REJECTED: dict[str, Any] = dict.fromkeys(EVENTS["request.rejected"][1])


def stopping(reason: str = "test") -> dict[str, object]:
    return {"reason": reason}


async def test_a_listener_receives_the_events_emitted_while_it_listens() -> None:
    stream = EventStream()
    stream.emit("daemon.stopping", **stopping("before"))
    with stream.listen() as listener:
        stream.emit("daemon.stopping", **stopping("during"))
        heard = await listener.next()
    stream.emit("daemon.stopping", **stopping("after"))
    assert (heard.name, heard.fields["reason"]) == ("daemon.stopping", "during")


async def test_a_slow_listener_loses_the_oldest_events_and_gets_their_count() -> None:
    listener = Listener(queue_max=2)
    stream = EventStream(listener.push)
    for reason in "abcd":
        stream.emit("daemon.stopping", **stopping(reason))
    heard = [await listener.next() for _ in range(3)]
    assert heard[0].name == "events.dropped"
    assert heard[0].fields == {"count": 2}
    assert [event.fields["reason"] for event in heard[1:]] == ["c", "d"]


def test_a_sink_gets_every_event_at_once() -> None:
    seen: list[Event] = []
    EventStream(seen.append).emit("daemon.stopping", **stopping())
    assert [event.name for event in seen] == ["daemon.stopping"]


def test_a_name_outside_the_table_is_rejected() -> None:
    with pytest.raises(KeyError):
        EventStream().emit("daemon.exploded")


def test_fields_other_than_those_of_the_table_are_rejected() -> None:
    with pytest.raises(ValueError, match="reason"):
        EventStream().emit("daemon.stopping", cause="x")


@pytest.mark.parametrize(("fault", "level"), [(False, "info"), (True, "warning")])
def test_an_exit_is_a_warning_if_it_was_a_fault(*, fault: bool, level: str) -> None:
    seen: list[Event] = []
    fields = {"instance": "a.0", "model": "a", "run": 1, "up_s": 1.0, "code": None, "signal": 15}
    EventStream(seen.append).emit("instance.exited", fault=fault, **fields)
    assert seen[0].level == level


def test_the_table_lists_exactly_the_events_that_the_code_emits() -> None:
    sources = [*(ROOT / "supervisor").rglob("*.py"), *(ROOT / "proxy").rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    emitted = set(re.findall(r'(?:emit\w*|tell|Event)\(\s*"([a-z_]+\.[a-z_]+)"', text))
    assert emitted <= set(EVENTS)
    # Some names stand in a table of the code.
    assert {name for name in EVENTS if f'"{name}"' not in text} == set()


def test_events_that_clients_cause_are_limited_per_minute_then_counted() -> None:
    seen: list[Event] = []
    stream = EventStream(seen.append)
    for number in range(5000):
        stream.emit("request.rejected", **(REJECTED | {"request": f"r{number}", "code": "no"}))
    assert len(seen) == 30
    stream.emit("request.rejected", **(REJECTED | {"code": "other"}))
    assert seen[-1].fields["code"] == "other"


def test_a_failing_sink_stops_no_other() -> None:
    def full(_: Event) -> None:
        raise OSError(28, "No space left on device")

    seen: list[Event] = []
    EventStream(full, seen.append).emit("daemon.stopping", **stopping())
    assert len(seen) == 1


AT = datetime(2026, 11, 21, 9, 0, 1, 250_000).astimezone()


def described(level: str = "info", **fields: object) -> str:
    stream = io.StringIO()
    write(describe("daemon.stopping", level, AT, fields, stream), stream, end="")
    return stream.getvalue()


def test_an_event_is_one_line_of_time_name_and_fields() -> None:
    assert described(reason="test", run=1) == "09:00:01.250 daemon.stopping     reason=test run=1"


def test_a_field_that_is_none_is_left_out() -> None:
    assert described(reason=None) == "09:00:01.250 daemon.stopping"


@pytest.mark.parametrize("text", ["two words", "two\nlines", "\x1b[31mred", ""])
def test_a_field_that_is_not_a_plain_word_is_quoted(text: str) -> None:
    line = described(reason=text)
    assert "\n" not in line
    assert "\x1b" not in line
    assert 'reason="' in line


@pytest.mark.parametrize(("level", "colour"), [("warning", "33"), ("error", "31")])
def test_warnings_and_errors_are_coloured(
    monkeypatch: pytest.MonkeyPatch, level: str, colour: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert f"\x1b[{colour}m" in described(level)


def test_a_field_without_a_value_may_be_left_out_only_where_the_list_says_so() -> None:
    seen: list[Event] = []
    stream, fields = EventStream(seen.append), dict.fromkeys(EVENTS["request.finished"][1])
    stream.report("request.finished", fields)
    for optional in ("load_group", "gave_way_ms"):
        del fields[optional]
        stream.report("request.finished", {**fields})
        assert optional not in seen[-1].fields
    assert len(seen) == 3
    for wrong in ({**fields, "more": 1}, {"model": "chat"}):
        with pytest.raises(ValueError, match="takes the fields"):
            stream.report("request.finished", wrong)
