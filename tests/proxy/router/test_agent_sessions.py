"""Sessions of agents on the whole proxy in virtual time, with held slots and without."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

from support.agents import AgentsCase, simulate


def test_agents_end_sooner_and_single_turns_lose_nothing() -> None:
    case = AgentsCase(seed=2, turns=(4, 8), prefill_tps=200)
    found, _ = simulate(case)
    without, _ = simulate(replace(case, proxy={"slot_hold_max_s": 0}))
    assert mean(found.sessions_s) <= 0.85 * mean(without.sessions_s)
    assert found.computed <= 0.85 * without.computed
    assert mean(found.singles_s) <= 1.02 * mean(without.singles_s)


def test_where_caches_lose_nothing_nothing_changes() -> None:
    case = AgentsCase(turns=(2, 4), host_cache_bytes=8e9, has_files=True)
    found, router = simulate(case)
    without, _ = simulate(replace(case, proxy={"slot_hold_max_s": 0}))
    assert not router.queues["chat"].holds.counts
    assert found == without


def test_little_is_computed_again_if_nothing_may_be_saved_while_streams_run() -> None:
    case = AgentsCase(
        seed=4,
        turns=(4, 8),
        prefill_tps=250,
        decode_tps=25,
        host_cache_bytes=8e9,
        has_files=True,
        proxy={"slot_save_pause_max_ms": 0},
    )
    found, _ = simulate(case)
    assert found.computed <= 0.8 * found.new
