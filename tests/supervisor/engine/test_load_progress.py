import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.engine.launch import ReportReader, read_report

PREFIX = b"cmd_child_to_router:state:"


def report(state: str, payload: object) -> bytes:
    return PREFIX + json.dumps({"state": state, "payload": payload}).encode() + b"\n"


LOADING = report(
    "loading", {"stages": ["text_model", "mmproj"], "current": "text_model", "value": 0.5}
)
READY = report("ready", {"id": "m", "meta": {}})


def test_reports_are_told_from_log_however_the_bytes_come() -> None:
    reader, reports, log = ReportReader(), [], b""
    for byte in b"hello\n" + LOADING + b"world\n" + READY:
        found, rest = reader.feed(bytes([byte]))
        reports += found
        log += rest
    assert reports == [("loading", ("text_model", 0.25)), ("ready", None)]
    assert log == b"hello\nworld\n"


def test_progress_counts_over_all_stages() -> None:
    payload = {"stages": ["a", "b"], "current": "b", "value": 1}
    assert read_report(report("loading", payload)) == ("loading", ("b", 1.0))


@pytest.mark.parametrize("value", [-1, 7])
def test_a_value_beyond_its_bounds_is_brought_within(value: float) -> None:
    found = read_report(report("loading", {"stages": ["a"], "current": "a", "value": value}))
    assert found
    _, progress = found
    assert progress
    assert 0 <= progress[1] <= 1


@pytest.mark.parametrize(
    "line", [b"", b"x", PREFIX, PREFIX + b"{", PREFIX + b"[]", PREFIX + b'{"state":1}']
)
def test_what_is_no_report_is_log(line: bytes) -> None:
    assert read_report(line) is None


def test_a_report_of_another_shape_still_tells_its_state() -> None:
    assert read_report(report("loading", {"percent": 3})) == ("loading", None)
    assert read_report(report("sleeping", None)) == ("sleeping", None)


@given(st.binary())
def test_no_bytes_break_it(data: bytes) -> None:
    ReportReader().feed(PREFIX + data + b"\n")
