"""A short run of scripts/fuzz, and what its own judgement rests on."""

import importlib
from pathlib import Path

import pytest
from fuzz import finding, observer, parts, verdict
from fuzz.attacks import attack
from fuzz.child import commands_a_terminal
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
def test_nothing_is_found_in_some_files(part: str, tmp_path: Path) -> None:
    findings = finding.Findings(tmp_path, 1)
    report = parts.run(part, 1, 150, 6, 0, findings)
    assert not findings.told
    assert report.inputs == 6


def test_nothing_is_found_by_some_requests(tmp_path: Path) -> None:
    findings = finding.Findings(tmp_path, 1)
    report = parts.run("http", 1, 60, 40, 0, findings)
    assert not findings.told
    assert report.inputs == 40
    assert report.figures["deaths of the daemon"] == "0"


ASKED = Input("members", (post("/v1/chat/completions", b"{}", (f"X-Api-Key: {KEY}",)),))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(500, {}, b"", "complete"), "500"),
        (Answer(502, {}, b"", "complete"), "502"),
        (Answer(503, {}, b"", "complete"), "without Retry-After"),
        (Answer(400, {"content-type": "text/plain"}, b"no", "complete"), "no error in JSON"),
        (Answer(200, {"content-type": "application/json"}, b"{", "complete"), "no JSON"),
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
def test_a_bad_answer_is_found(answer: Answer, words: str) -> None:
    assert words in "; ".join(verdict.wrong(ASKED, answer))


def test_a_good_refusal_is_no_finding() -> None:
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
def test_a_bad_line_of_the_log_is_found(line: dict[str, object] | str) -> None:
    assert observer.wrong(line)


@pytest.mark.parametrize("character", ["\x1b", "\x00", "\x9b", "\u202e", "\u2028"])
def test_what_commands_a_terminal_is_found(character: str) -> None:
    assert commands_a_terminal(character)
    assert not any(map(commands_a_terminal, "\n\ta\u0130\U0001f999\ufeff"))


def test_a_traceback_is_one_text_of_a_log() -> None:
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
