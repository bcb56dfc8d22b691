from __future__ import annotations

from supervisor.bench.tune_search import GOALS, Figures

BASE = [Figures(100 + number, 1.0 + number / 100, 200, 1000) for number in range(4)]


def other(decode: float = 1, first: float = 1) -> list[Figures]:
    return [Figures(entry.decode * decode, entry.first_token_s * first, 200, 500) for entry in BASE]


def test_an_answer_takes_its_first_token_and_its_decoding() -> None:
    assert GOALS["latency"].score(Figures(decode=100, first_token_s=2)) == 1 / 4


def test_latency_is_not_bought_by_one_of_its_two_figures() -> None:
    latency = GOALS["latency"]
    assert latency.drawback(BASE, other()) is None
    assert "decodes 1.2" in (latency.drawback(BASE, other(decode=0.8, first=0.3)) or "")
    assert "the first token takes" in (latency.drawback(BASE, other(decode=1.5, first=1.4)) or "")


def test_less_memory_may_cost_a_tenth_of_the_speed() -> None:
    memory = GOALS["memory"]
    assert memory.score(Figures(peak_bytes=500)) > memory.score(Figures(peak_bytes=1000))
    assert memory.drawback(BASE, other(decode=0.92)) is None
    assert memory.drawback(BASE, other(decode=0.88)) == "it decodes at 0.88 of the speed"


def test_throughput_counts_all_streams() -> None:
    assert GOALS["throughput"].score(Figures(total=200)) == 200
