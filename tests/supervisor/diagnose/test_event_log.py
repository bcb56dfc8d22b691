"""The daemon's events in a report."""

from __future__ import annotations

import json
from typing import Any

from supervisor.diagnose.report import LEFT_OUT, clean_event, without_texts


def cleaned(*, has_quotes: bool = False, **event: Any) -> dict[str, Any]:
    return clean_event(event, has_quotes=has_quotes)


def test_figures_and_names_are_kept() -> None:
    event: dict[str, Any] = {
        "event": "request.finished",
        "model": "chat",
        "prompt_tokens": 4,
        "status": 200,
    }
    assert cleaned(**event) == event


def test_what_a_client_sent_is_left_out() -> None:
    found = cleaned(event="request.rejected", reason="no model is named quokka", path="/quokka")
    assert (found["reason"], found["path"]) == (LEFT_OUT, LEFT_OUT)


def test_our_reasons_are_kept_without_the_engines_last_line() -> None:
    reason = "the engine ended with code 1; its last error: quokka"
    found = cleaned(event="instance.failed", reason=reason)
    assert found["reason"] == f"the engine ended with code 1; its last error: {LEFT_OUT}"
    found = cleaned(event="instance.failed", reason=reason, has_quotes=True)
    assert found["reason"] == LEFT_OUT


def test_of_an_exception_its_class_and_place_are_kept() -> None:
    trace = 'Traceback:\n  File "a.py", line 3, in f\n    quokka()\nKeyError: "quokka"\n'
    found = cleaned(
        event="task.failed", error="internal error: KeyError('quokka')", traceback=trace
    )
    assert found["error"] == "KeyError"
    assert found["traceback"] == '  File "a.py", line 3, in f'


def test_other_lines_are_counted() -> None:
    lines = [json.dumps({"event": "daemon.started"}), "quokka", "[1]", ""]
    events, left_out = without_texts(lines, has_quotes=False)
    assert (len(events), left_out) == (1, 2)
