"""Engines of 0.001 s a token of a prompt and 0.01 s a pass for answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from proxy.router.forecast import (
    EngineCosts,
    EngineWork,
    ModelWork,
    RunningRequest,
    WaitingRequest,
    first_token,
)

COSTS = EngineCosts((0.0, 0.001, 0.0, 0.0), (0.01, 0.0, 0.0))
BATCH = 100


class FirstToken(NamedTuple):
    instance: str
    queued_s: float
    first_token_s: float


def simulated(work: ModelWork, costs: EngineCosts = COSTS) -> FirstToken:
    found = first_token(work, costs)
    assert found
    return FirstToken(*found)


def engine(
    *running: RunningRequest, free: tuple[int, ...] = (), name: str = "chat.0", weight: float = 1.0
) -> EngineWork:
    return EngineWork(name, BATCH, running, free, weight)


def wait(tokens: int, answer: float = 10, **new: int) -> WaitingRequest:
    return WaitingRequest(
        tokens, answer, None, {f"chat.{name[1:]}": entry for name, entry in new.items()}
    )


def found(*engines: EngineWork, ahead: tuple[WaitingRequest, ...] = (), tokens: int) -> FirstToken:
    work = ModelWork(engines, (*ahead, wait(tokens)), len(ahead))
    first = simulated(work)
    return rounded(first)


def rounded(first: FirstToken) -> FirstToken:
    return FirstToken(first.instance, round(first.queued_s, 6), round(first.first_token_s, 6))


def test_an_idle_engine_only_computes_the_prompt() -> None:
    assert found(engine(free=(0,)), tokens=500) == FirstToken("chat.0", 0.0, 0.5)


def test_without_a_slot_nothing_is_known() -> None:
    assert first_token(ModelWork((engine(),), (wait(5),), 0), COSTS) is None
    assert first_token(ModelWork((), (wait(5),), 0), COSTS) is None


def test_cached_tokens_are_not_computed_and_deep_ones_take_longer() -> None:
    work = ModelWork((engine(free=(0,)),), (wait(1000, n0=100),), 0)
    first = simulated(work)
    assert first.first_token_s == pytest.approx(0.1)
    deeper = simulated(work, EngineCosts((0.0, 0.001, 0.00001, 0.0002), (0.01, 0.0, 0.0)))
    assert deeper.first_token_s == pytest.approx(0.1 + 0.00001 * 100 * 950 + 0.0002 * 900)


def test_a_request_waits_for_the_answer_that_ends_first() -> None:
    busy = engine(RunningRequest(0, 0, 0, 50.0), RunningRequest(1, 0, 0, 10.0))
    first = found(busy, tokens=50)
    assert first.queued_s == pytest.approx(0.1, abs=0.01)
    assert first.first_token_s == pytest.approx(0.15, abs=0.02)


def test_those_before_it_are_computed_first() -> None:
    alone = found(engine(free=(0,)), tokens=50).first_token_s
    ahead = (wait(1000), wait(1000))
    behind = found(engine(free=(0,)), ahead=ahead, tokens=50)
    assert behind.queued_s == pytest.approx(2 * (1.0 + 0.1), rel=0.05)
    assert behind.first_token_s == pytest.approx(behind.queued_s + alone, rel=0.05)


def test_prompts_share_an_engine_in_the_order_of_their_slots() -> None:
    low, high = RunningRequest(0, 1000, 0, 5.0), RunningRequest(3, 1000, 0, 5.0)
    assert found(engine(low, free=(2,)), tokens=50).first_token_s == pytest.approx(1.0, rel=0.1)
    assert found(engine(high, free=(2,)), tokens=50).first_token_s < 0.2


def test_the_faster_and_the_freer_engine_answers() -> None:
    slow = engine(free=(0,), weight=0.5)
    assert found(slow, tokens=500).first_token_s == pytest.approx(1.0)
    busy = engine(RunningRequest(0, 0, 0, 100.0))
    assert found(busy, engine(free=(0,), name="chat.1"), tokens=50).instance == "chat.1"


def test_a_prompt_goes_where_most_of_it_is() -> None:
    one, other = engine(free=(0,)), engine(free=(0,), name="chat.1")
    work = ModelWork((one, other), (wait(1000, n0=1000, n1=100),), 0)
    first = simulated(work)
    assert first.instance == "chat.1"


def test_a_request_that_waits_for_its_owner_delays_none_behind_it() -> None:
    owner = engine(RunningRequest(0, 0, 0, 100.0))
    bound = WaitingRequest(10, 10.0, instance="chat.0")
    first = found(owner, engine(free=(0,), name="chat.1"), ahead=(bound,), tokens=50)
    assert first == FirstToken("chat.1", 0.0, 0.05)


def test_a_model_that_loads_begins_later() -> None:
    work = ModelWork((engine(free=(0,)),), (wait(100),), 0, ready_in_s=3.0)
    first = simulated(work)
    assert rounded(first) == FirstToken("chat.0", 3.0, 3.1)


def test_hundreds_of_long_requests_take_few_steps() -> None:
    ahead = tuple(wait(30_000, 2000.0) for _ in range(200))
    assert found(engine(free=(0, 1, 2, 3)), ahead=ahead, tokens=50).queued_s > 1000
