"""A short run of scripts/fuzz, and tests of its own checks."""

import importlib
from pathlib import Path

import pytest
from fuzz import finding, observer, parts, properties, verdict
from fuzz.attacks import attack
from fuzz.child import is_control_character
from fuzz.client import Answer
from fuzz.daemon import read_log
from fuzz.request import KEY, Input, post


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert [attack(1, number) for number in range(60)] == [
        attack(1, number) for number in range(60)
    ]
    assert attack(1, 0) != attack(2, 0)


@pytest.mark.parametrize("part", ["settings", "keys", "profiles", "gguf"])
def test_the_same_seed_gives_the_same_files(part: str) -> None:
    case = importlib.import_module(f"fuzz.{part}").case
    assert [case(1, number) for number in range(100)] == [case(1, number) for number in range(100)]


@pytest.mark.parametrize("part", ["settings", "keys", "profiles", "gguf"])
def test_some_files_cause_no_finding(part: str, tmp_path: Path) -> None:
    findings = finding.Findings(tmp_path, 1)
    report = parts.run(part, 1, 150, 6, 0, findings)
    assert not findings.reports
    assert report.inputs == 6


def test_some_requests_cause_no_finding(tmp_path: Path) -> None:
    findings = finding.Findings(tmp_path, 1)
    report = parts.run("http", 1, 60, 40, 0, findings)
    assert not findings.reports
    assert report.inputs == 40
    assert report.figures["deaths of the daemon"] == "0"


PROPERTY = """
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers(0, 9))
def test_no_number_is_7(number):
    assert number != 7
"""


def test_a_property_that_fails_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROPERTY, "utf-8")
    profile = 'import hypothesis\nhypothesis.settings.register_profile("search", database=None)\n'
    (tmp_path / "conftest.py").write_text(profile, "utf-8")
    findings, limits = finding.Findings(tmp_path, 1), finding.Limits(150, 1)
    report = properties.run(1, limits, findings, tmp_path / "h", root=tmp_path)
    assert report.inputs == 1
    ((cause, text),) = findings.reports.items()
    assert "test_no_number_is_7 fails" in cause
    assert "number=7" in text


ASKED = Input("members", (post("/v1/chat/completions", b"{}", (f"X-Api-Key: {KEY}",)),))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(500, {}, b"", "complete"), "500"),
        (Answer(502, {}, b"", "complete"), "502"),
        (Answer(503, {}, b"", "complete"), "without Retry-After"),
        (Answer(400, {"content-type": "text/plain"}, b"no", "complete"), "no error in JSON"),
        (Answer(200, {"content-type": "application/json"}, b"{", "complete"), "not JSON"),
        (Answer(None, {}, b"", "timeout"), "no answer"),
        (Answer(200, {}, b"", "closed"), "does not end well"),
        (
            Answer(
                *(200, {"content-type": "text/event-stream"}),
                *(b'data: {"error":{"code":500,"message":"x"}}\n\n', "complete"),
            ),
            "an error event",
        ),
    ],
)
def test_a_bad_response_is_a_finding(answer: Answer, words: str) -> None:
    assert words in "; ".join(verdict.wrong(ASKED, answer))


def test_a_correct_rejection_is_no_finding() -> None:
    body = b'{"error":{"message":"m","type":"t","code":"c"}}'
    answer = Answer(400, {"content-type": "application/json"}, body, "complete")
    assert not list(verdict.wrong(ASKED, answer))


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "a warning of some library",
        {"event": "instance.exited", "fault": True, "signal": 11},
        {"event": "instance.failed"},
        {"event": "task.failed", "task": "slots", "error": "e"},
        {"event": "request.rejected", "status": 500, "reason": "w"},
    ],
)
def test_a_bad_log_line_is_a_finding(line: dict[str, object] | str) -> None:
    assert observer.wrong(line)


@pytest.mark.parametrize("character", ["\x1b", "\x00", "\x9b", "\u202e", "\u2028"])
def test_a_control_character_is_a_finding(character: str) -> None:
    assert is_control_character(character)
    assert not any(map(is_control_character, "\n\ta\u0130\U0001f999\ufeff"))


def test_a_traceback_is_one_text_of_the_log() -> None:
    lines = [
        '{"event": "a"}',
        "it failed",
        "Traceback (most recent call last):",
        "  File x",
        "E: y",
    ]
    event, text = read_log("\n".join(lines))
    assert event == {"event": "a"}
    assert observer.wrong(text) == ["a traceback in the daemon's log: E: y"]
