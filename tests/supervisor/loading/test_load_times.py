from __future__ import annotations

import pytest

from supervisor.loading.controller import LoadTimes


def loaded(*durations_s: float) -> LoadTimes:
    times = LoadTimes()
    for duration_s in durations_s:
        times.begin("chat", 0.0)
        times.observe("chat", "loaded", duration_s)
    return times


def test_nothing_is_known_of_a_model_that_was_never_loaded() -> None:
    times = LoadTimes()
    assert times.usual_s("chat") is None
    assert times.left_s("chat", 0.0, 5.0) is None


def test_the_latest_loads_tell_the_usual_one() -> None:
    assert loaded(4.0).left_s("chat", 0.0, 0.0) == 4.0
    assert loaded(4.0, 1.0).usual_s("chat") == 1.0
    assert loaded(1.0, 1.1, 9.0, 1.2, 1.3).usual_s("chat") == 1.2
    assert loaded(1.0, 1.0, 1.0, 3.0, 3.0, 3.0).usual_s("chat") == 3.0


def test_a_load_under_way_has_the_rest_left() -> None:
    times = loaded(4.0)
    times.begin("chat", 10.0)
    times.observe("chat", "loading", 11.0)
    assert times.left_s("chat", 0.1, 11.0) == 3.0
    assert times.left_s("chat", 0.5, 18.0) == 8.0  # it takes longer than usual


def test_progress_tells_of_a_first_load() -> None:
    times = LoadTimes()
    times.begin("chat", 0.0)
    assert times.left_s("chat", 0.05, 3.0) is None
    assert times.left_s("chat", 0.25, 3.0) == pytest.approx(9.0)


def test_a_load_that_failed_says_nothing() -> None:
    times = LoadTimes()
    times.begin("chat", 0.0)
    times.observe("chat", "failed", 1.0)
    assert times.usual_s("chat") is None
