"""Which lines of an engine's log get into a report."""

from __future__ import annotations

import pytest

from supervisor.diagnose.report import LogFilter, is_figures

RUN = "[llama-corral: run 1, 2026-11-22T23:16:22+00:00] /bin/llama-server --model chat.gguf"
LOAD = "0.00.089.685 I srv    load_model: loading model '/models/chat.gguf'"
LISTENING = "0.02.036.473 I srv  llama_server: listening on unix:///run/chat.0.sock"
FIGURES = (
    "0.05.212.367 I slot print_timing: id  1 | task 5 | prompt eval time =     129.19 ms /    90 "
    "tokens (    1.44 ms per token,   696.66 tokens per second)"
)
DEBUG = "0.06.465.819 D srv    operator(): Grammar (): secret words"


def test_a_load_and_figures_are_kept() -> None:
    lines = [RUN, LOAD, LISTENING, FIGURES]
    assert list(LogFilter().read(lines)) == lines


@pytest.mark.parametrize(
    "line",
    [
        DEBUG,
        "quokka",
        "123 456 7890",
        "E srv operator(): got exception: {'message': 'quokka'}",
        "0.05.212.367 I slot launch_slot_: id  0 | task 5 | quokka",
        LOAD,
    ],
)
def test_after_the_load_other_lines_are_left_out(line: str) -> None:
    log_filter = LogFilter()
    assert list(log_filter.read([RUN, LISTENING, line, FIGURES])) == [RUN, LISTENING, FIGURES]
    assert log_filter.left_out == 1


def test_a_prompt_cannot_begin_a_run_in_the_log_of_a_verbose_engine() -> None:
    log_filter = LogFilter()
    assert list(log_filter.read([RUN, LISTENING, DEBUG, RUN, "quokka", FIGURES])) == [
        RUN,
        LISTENING,
        FIGURES,
    ]
    assert log_filter.is_verbose


def test_the_middle_of_a_run_has_figures_only() -> None:
    assert list(LogFilter().read([LOAD, "quokka", FIGURES, RUN, LOAD])) == [FIGURES, RUN, LOAD]


def test_figures_of_earlier_builds_are_recognised() -> None:
    assert is_figures("slot launch_slot_: id  0 | task 0 | processing task")
    assert is_figures("srv  update_slots: all slots are idle")
