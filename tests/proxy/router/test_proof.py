"""Which answer proves the fate of a restored conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.requests import ask
from support.upstream import Call, Fake

from proxy.cache.fingerprint import RestoredSlot, decode_fingerprint
from proxy.request.request import ProxyRequest
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Timings

STORY = "a long story of a river and a stone " * 10
FIRST = ask(STORY)
NEXT = ask(STORY, "verse", "and then?")
HELD = [{"id": 0, "id_task": 3, "n_prompt_tokens": 300, "is_processing": False}]


class Verified:
    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []

    def note(self, name: str, tokens: int, timings: Timings) -> None:
        self.found.append((name, tokens, timings.cached_tokens))


class Engine(Fake):
    """Has one slot, whose state the test sets."""

    page = HELD
    batch_s = 0.0  # it answers between two batches

    def __init__(self, socket: Path) -> None:
        super().__init__("chat.0", socket, self._play)
        self.says_slots = False

    async def _play(self, call: Call) -> None:
        await asyncio.sleep(self.batch_s)
        said = json.dumps(self.page).encode()
        await call.head("Content-Type: application/json", f"Content-Length: {len(said)}")
        await call.send(said)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    with TemporaryDirectory(prefix="corral-") as directory:
        engine = Engine(Path(directory) / "engine.sock")
        await engine.start()
        yield engine
        await engine.stop()


async def answered(router: Router, asked: ProxyRequest) -> int | None:
    """Have a request answered from 20 cached tokens; return the slot that it named."""
    async with router.lease(asked) as lease:
        router.finish(lease, Completion(Timings(20, 280, 1.0, 1, 1.0), {"content": "verse"}))
        return lease.id_slot


async def begun(engine: Engine, verified: Verified) -> Router:
    """Return a proxy to which an instance came back with the conversation of FIRST."""
    upstream = replace(engine.upstream(slots=1), can_name_slots=True)
    before = Router()
    before.admit(upstream)
    await answered(before, FIRST)
    (chain,) = before.conversation_fingerprints(
        "chat.0", [SlotState(0, 1, 300, is_busy=False)]
    ).values()
    router = Router()
    router.signals.restore_verified.connect(verified.note)
    router.admit(upstream, [RestoredSlot(0, 3, 300, decode_fingerprint(chain.to_ascii()))])
    return router


async def test_the_first_turn_in_the_slot_that_it_names_does(engine: Engine) -> None:
    router = await begun(engine, verified := Verified())
    assert await answered(router, NEXT) == 0
    assert verified.found == [("chat.0", 300, 20)]
    await answered(router, ask(STORY, "verse", "and then?", "verse", "and then?"))
    assert len(verified.found) == 1


async def test_a_long_batch_does_not_lose_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await begun(engine, Verified())
    monkeypatch.setattr(get_slots, "__defaults__", (0.01,))
    engine.batch_s = 0.05
    assert await answered(router, NEXT) == 0


async def test_one_that_cannot_name_it_does_not(engine: Engine) -> None:
    router = await begun(engine, verified := Verified())
    assert await answered(router, replace(NEXT, kind=EndpointKind.MESSAGES)) is None
    assert not verified.found


async def test_one_that_does_not_look_in_the_cache_does_not(engine: Engine) -> None:
    router = await begun(engine, verified := Verified())
    members = {**NEXT.json, "cache_prompt": False}
    assert await answered(router, replace(NEXT, json=members)) == 0
    assert not verified.found


async def test_a_slot_that_somebody_used_meanwhile_is_not_named(engine: Engine) -> None:
    router = await begun(engine, verified := Verified())
    engine.page = [{**HELD[0], "id_task": 9, "n_prompt_tokens": 7}]
    assert await answered(router, NEXT) is None
    assert not verified.found


async def test_another_conversation_in_it_does_not(engine: Engine) -> None:
    router = await begun(engine, verified := Verified())
    assert await answered(router, ask("quite another")) is None
    assert await answered(router, NEXT) is None
    assert not verified.found


class Played:
    """A proxy with the engine, and its clock."""

    def __init__(self, engine: Engine, *, api_key: str = "inner") -> None:
        self._engine = engine
        self._now_s = 0.0
        self.router = Router(clock=lambda: self._now_s)
        upstream = replace(engine.upstream(slots=1), can_name_slots=True, cache_key="key")
        self.router.admit(replace(upstream, api_key=api_key))

    async def turn(self, asked: ProxyRequest, cached: int) -> int | None:
        """Answer a turn after a minute; return the slot that it named."""
        self._now_s += 60
        timings = Timings(cached, 300 - cached, 1.0, 1, 1.0)
        async with self.router.lease(asked) as lease:
            self.router.finish(lease, Completion(timings, {"content": "verse"}))
            return lease.id_slot

    @property
    def asked(self) -> int:
        return self._engine.calls.qsize()


async def test_an_engine_that_only_we_use_is_not_asked_for_its_slots(engine: Engine) -> None:
    played = Played(engine)
    assert [await played.turn(FIRST, 0), await played.turn(NEXT, 290)] == [0, 0]
    assert played.asked == 0


async def test_after_a_task_without_a_lease_it_is(engine: Engine) -> None:
    played = Played(engine)
    await played.turn(FIRST, 0)
    played.router.note_task("chat.0")
    assert await played.turn(NEXT, 290) == 0
    assert played.asked == 1


async def test_so_is_an_engine_that_others_can_use(engine: Engine) -> None:
    played = Played(engine, api_key="")
    await played.turn(FIRST, 0)
    assert await played.turn(NEXT, 290) == 0
    assert played.asked == 1


async def test_an_answer_without_the_cache_that_was_expected_makes_us_ask(engine: Engine) -> None:
    played = Played(engine)
    more = ("verse", "and then?")
    await played.turn(FIRST, 0)
    await played.turn(NEXT, 0)
    assert played.asked == 0
    assert await played.turn(ask(STORY, *more, *more), 290) == 0
    assert played.asked == 1
