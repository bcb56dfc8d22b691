from datetime import UTC, datetime
from pathlib import Path

from supervisor.events import Event
from supervisor.log import journal_entry, send_to_journal

AT = datetime(2026, 11, 21, 9, tzinfo=UTC)


def fields_of(entry: bytes) -> dict[str, str]:
    """Read an entry as journald does."""
    found = {}
    while entry:
        name, _, rest = entry.partition(b"\n")
        size = int.from_bytes(rest[:8], "little")
        found[name.decode()] = rest[8 : 8 + size].decode()
        assert rest[8 + size : 9 + size] == b"\n"
        entry = rest[9 + size :]
    return found


def test_an_event_has_its_priority_and_fields() -> None:
    event = Event("instance.failed", AT, {"instance": "a.0", "failures": 5, "hint": None})
    assert fields_of(journal_entry(event)) == {
        "MESSAGE": "instance.failed instance=a.0 failures=5",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "llama-corral",
        "CORRAL_EVENT": "instance.failed",
        "CORRAL_INSTANCE": "a.0",
        "CORRAL_FAILURES": "5",
    }


def test_a_value_adds_no_field_and_is_bounded() -> None:
    event = Event("daemon.stopping", AT, {"reason": "a\nPRIORITY=0\n" + "x" * 100_000})
    found = fields_of(journal_entry(event))
    assert found["PRIORITY"] == "6"
    assert found["CORRAL_REASON"].startswith("a\nPRIORITY=0\nxx")
    assert len(journal_entry(event)) < 20_000


def test_without_a_journal_nothing_is_sent(tmp_path: Path) -> None:
    assert not send_to_journal(b"", tmp_path / "socket")
