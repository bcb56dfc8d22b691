"""The sum of all accounts equals the count of an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.requests import ask, upstream

from proxy.router.lease import Lease, RoutingTarget, SlotUse, Tokens, slot_use
from proxy.upstream.upstream import Rates, Timings
from supervisor.backend.usage import EngineUse, UsageEngines, UsageRecorder, share_tokens
from supervisor.events import EVENTS, Event
from supervisor.records.store import RecordStore
from supervisor.records.usage import Usage
from supervisor.records.writer import Records

# No process has it, so no processor time is read.
_PID = 2**22 + 1


class Engine(UsageEngines):
    """One engine with figures that a test sets."""

    def __init__(self) -> None:
        self.process = _PID
        self.tokens: Tokens | None = Tokens()

    def ready(self) -> Iterator[tuple[str, str]]:
        yield "chat.0", "chat"

    def pid(self, _instance: str, /) -> int | None:
        return self.process

    async def count_tokens(self, _instance: str, /) -> Tokens | None:
        return self.tokens


class KeptUsage(Records):
    """Records that keep usage in memory."""

    def __init__(self, root: Path) -> None:
        super().__init__(RecordStore(root), lambda *_, **__: None, lambda: None, lambda _: False)
        self.kept: dict[str, Usage] = defaultdict(Usage)

    def add_usage(self, key: str, model: str, used: Usage) -> None:
        assert model == "chat"
        self.kept[key] += used


class Recorded:
    def __init__(self, root: Path) -> None:
        self.engine = Engine()
        self.records = KeptUsage(root)
        self.is_on = True
        self.recorder = UsageRecorder(
            self.records, self.engine, is_on=lambda: self.is_on, has_keys=True
        )
        self._lease = 0

    def answer(
        self, key: str, tokens: Tokens, *, is_exact: bool = True, is_cut_off: bool = False
    ) -> None:
        self._lease += 1
        self.recorder.slots_taken(self._lease, upstream("chat.0"), 1)
        self.recorder.slots_freed(
            self._lease, SlotUse(key, "chat", "chat.0", tokens, 2.0, is_exact, is_cut_off)
        )

    def tokens(self) -> dict[str, tuple[int, int, int]]:
        found = self.records.kept.items()
        return {
            key: (entry.prompt_tokens, entry.cached_tokens, entry.generated_tokens)
            for key, entry in found
        }


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


async def test_each_kind_of_internal_work_has_a_separate_account(recorded: Recorded) -> None:
    recorded.answer("anna", Tokens(100, 20, 10))
    recorded.engine.tokens = Tokens(107, 20, 11)
    await recorded.recorder.settle()
    await recorded.recorder.settle()
    accounts = {"anna": (100, 20, 10), "(warming)": (7, 0, 1)}
    assert recorded.tokens() == accounts
    recorded.answer("(files)", Tokens(), is_exact=False)
    recorded.engine.tokens = Tokens(157, 20, 12)
    await recorded.recorder.settle()
    accounts["(files)"] = (50, 0, 1)
    assert recorded.tokens() == accounts
    recorded.answer("(ahead)", Tokens(30, 10, 0))
    recorded.engine.tokens = Tokens(194, 30, 13)
    await recorded.recorder.settle()
    assert recorded.tokens() == {**accounts, "(ahead)": (30, 10, 0), "(checks)": (7, 0, 1)}


async def test_aborted_requests_get_the_tokens_that_the_engine_counted_beyond_the_sum(
    recorded: Recorded,
) -> None:
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.answer("ben", Tokens(), is_exact=False)
    recorded.engine.tokens = Tokens(612, 0, 10)
    await recorded.recorder.settle()
    assert recorded.tokens() == {"anna": (100, 0, 10), "ben": (512, 0, 0)}


async def test_tokens_that_the_engine_did_not_count_are_taken_from_aborted_requests(
    recorded: Recorded,
) -> None:
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.answer("ben", Tokens(50, 0, 30), is_cut_off=True)
    recorded.engine.tokens = Tokens(150, 2, 35)
    await recorded.recorder.settle()
    assert recorded.tokens() == {
        "anna": (100, 0, 10),
        "ben": (50, 0, 25),
        "(warming)": (0, 2, 0),
    }


async def test_an_answer_is_counted_once_before_its_end_and_after_it(recorded: Recorded) -> None:
    lease = Lease(ask("hi", client="anna"), RoutingTarget(upstream("chat.0"), Rates()), float)
    lease.report(Timings(20, 100, 100.0, 10, 1000.0))
    recorded.recorder.slots_taken(lease, upstream("chat.0"), 1)
    recorded.recorder.answered(lease)
    before = recorded.records.kept["anna"]
    assert before[:4] == (1, 100, 20, 10)
    recorded.recorder.answered(lease)
    recorded.recorder.slots_freed(lease, slot_use(lease, 1, ()))
    finished = dict.fromkeys(EVENTS["request.finished"][1]) | {"client": "anna", "model": "chat"}
    for request in ("req_1", "refused"):
        event = Event("request.finished", datetime.now(UTC), finished | {"request": request})
        recorded.recorder.observe(event)
    assert recorded.records.kept["anna"][:4] == (2, 100, 20, 10)


async def test_an_engine_with_requests_is_not_read(recorded: Recorded) -> None:
    recorded.recorder.slots_taken("first", upstream("chat.0"), 1)
    recorded.engine.tokens = Tokens(50, 0, 0)
    await recorded.recorder.settle()
    assert recorded.tokens() == {}


async def test_another_process_counts_from_nothing(recorded: Recorded) -> None:
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.engine.process, recorded.engine.tokens = _PID + 1, Tokens(7, 0, 1)
    await recorded.recorder.settle()
    assert recorded.tokens()["(warming)"] == (7, 0, 1)


async def test_nothing_is_recorded_where_that_is_off(recorded: Recorded) -> None:
    recorded.is_on = False
    recorded.answer("anna", Tokens(1, 1, 1))
    assert recorded.tokens() == {}


def test_processor_time_is_shared_by_slots_and_by_how_long_they_were_held() -> None:
    def end(lease: str) -> float:
        use = SlotUse("anna", "chat", "chat.0", Tokens(), 1.0)
        return round(engine.end(lease, "anna", use), 6)

    engine = EngineUse(None, "chat")
    engine.read_cpu(2.0, 10.0)  # loading
    engine.begin("a", 1, 10.0)
    engine.begin("b", 1, 12.0)
    engine.read_cpu(10.0, 14.0)  # a held 4 s, b held 2 s
    assert end("a") == round(8.0 * 4 / 6, 6)
    engine.begin("c", 2, 14.0)
    engine.read_cpu(13.0, 15.0)  # b one slot, c two
    assert end("b") == round(8.0 * 2 / 6 + 1.0, 6)
    assert end("c") == 2.0
    assert engine.own_s == 2.0
    engine.read_cpu(14.0, 20.0)
    assert (engine.own_s, engine.holders) == (3.0, {})


def test_no_token_is_lost_when_some_are_shared_out() -> None:
    parts = share_tokens(Tokens(10, 1, 7), {"a": 1.0, "b": 1.0, "c": 0.0})
    assert sum(parts.values(), Tokens()) == Tokens(10, 1, 7)
    assert parts["a"].prompt == parts["b"].prompt == 5
    assert sum(share_tokens(Tokens(5, 0, 0), {"a": 0.0, "b": 0.0}).values(), Tokens()) == Tokens(
        5, 0, 0
    )
