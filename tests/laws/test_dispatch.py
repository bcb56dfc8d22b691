"""The laws of queues and leases, under random schedules."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.requests import ask, upstream
from support.slots import busy_slots
from support.virtual_time import run_in_virtual_time

from proxy.errors import ModelLoading, QueueFull, QueueTimeout, Unavailable, UpstreamShutDown
from proxy.request.models import ModelInfo, ModelNames, OnLoad, do_nothing_on_load
from proxy.request.request import Priority
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream

CLIENTS = ("ann", "bob", "cat")
NAMES = ("chat.1", "chat.2", "chat.3")
LINE_MAX = 4
TEXTS = ("short", "long " * 60, "longer " * 90)


@dataclass(frozen=True)
class Visit:
    """One request: who asks, how long it holds a slot, and when its client leaves."""

    client: str
    priority: Priority
    text: str
    queue_timeout_s: float
    holds_s: float
    leaves_after_s: float | None
    is_complete: bool
    avoid: tuple[str, ...]


@dataclass
class World:
    """A dispatch, its engines, and the outcome of each request."""

    router: Router
    lag_s: float = 0.0
    is_strict: bool = False
    slots: dict[str, int] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    served: dict[int, tuple[Visit, float]] = field(default_factory=dict)
    using: Counter[str] = field(default_factory=Counter)
    joined: int = 0

    async def step(self, verb: str, what: object, visitors: asyncio.TaskGroup) -> None:
        """Do one step of a schedule, and see that the laws hold."""
        match verb, what:
            case "visit", Visit() as visit:
                visitors.create_task(self.visit(visit))
            case "admit", (str() as name, int() as slots):
                self.router.admit(upstream(name, self.slots.setdefault(name, slots)))
            case "withdraw", str() as name:
                self.router.withdraw(name)
            case "close", str() as name:
                await self.router.close(name)
            case "pass", float() as seconds:
                await asyncio.sleep(seconds)
        if "chat" in self.router.queues.stats():
            self.check()

    async def visit(self, visit: Visit) -> None:
        """Live through one request; whoever leaves, leaves by cancellation."""
        self.joined += 1
        number = self.joined
        try:
            async with asyncio.timeout(visit.leaves_after_s):
                self.ends[await self.ask(number, visit)] += 1
        except TimeoutError:
            self.ends["left"] += 1

    async def ask(self, number: int, visit: Visit) -> str:
        request = ask(
            visit.text,
            client=visit.client,
            priority=visit.priority,
            queue_timeout_s=visit.queue_timeout_s,
        )
        try:
            async with self.router.lease(
                request, visit.avoid, NoLoader(self).ensure_ready
            ) as lease:
                self.served[number] = visit, lease.began_at_s
                await self.use(lease.upstream.name, visit.holds_s)
                if visit.is_complete:
                    self.router.finish(lease)
                self.check()
        except QueueFull:
            return "refused"
        except (QueueTimeout, ModelLoading):
            return "timed out"
        except Unavailable:
            return "unavailable"
        except UpstreamShutDown:
            return "cut"
        return "served"

    async def use(self, name: str, holds_s: float) -> None:
        """Use a slot of an engine, as long as the request lasts and not a moment longer."""
        self.using[name] += 1
        assert self.using[name] <= self.slots[name], "a slot is held twice"
        try:
            await asyncio.sleep(holds_s)
        finally:
            if asyncio.current_task().cancelling() and self.lag_s:  # type: ignore[union-attr]
                # An engine goes on for a while after its client has left.
                asyncio.get_running_loop().call_later(self.lag_s, self.stop, name)
            else:
                self.stop(name)

    def stop(self, name: str) -> None:
        self.using[name] -= 1

    async def list_slots(self, engine: Upstream) -> list[SlotState]:
        return busy_slots(self.using[engine.name])

    def check(self) -> None:
        """See that no slot is given twice; strictly, that none is free while somebody waits.

        But for one, which a batch request leaves to interactive ones.
        """
        for instance in self.router.instances():
            assert len(instance.leases) <= instance.upstream.slots
        if not self.is_strict:
            return
        line = self.router.queues.stats()["chat"]
        free = sum(
            instance.upstream.slots - len(instance.leases)
            for instance in self.router.instances()
            if instance.in_service
        )
        assert not free or not line.interactive
        assert free <= 1 or not line.batch

    def see_that_all_is_over(self) -> None:
        """See that every request ended once, and that nothing is held or waited for."""
        assert sum(self.ends.values()) == self.joined
        assert all(not instance.leases for instance in self.router.instances())
        for line in self.router.queues.stats().values():
            assert (line.interactive, line.batch) == (0, 0)
        assert not any(self.router.count_in_flight(name) for name in NAMES)


class NoLoader:
    """Says at once that a model is not up, or waits until it is."""

    def __init__(self, world: World) -> None:
        self.world = world

    def models(self) -> list[ModelInfo]:
        return []

    def names(self) -> ModelNames:
        return ModelNames(())

    async def ensure_ready(self, model: str, on_load: OnLoad = do_nothing_on_load) -> None:
        on_load()
        while not self.world.router.serves(model):  # noqa: ASYNC110 (slow to notice, as some)
            await asyncio.sleep(0.7)


Step = Callable[[World, asyncio.TaskGroup], None]

durations = st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0])
visits = st.builds(
    Visit,
    client=st.sampled_from(CLIENTS),
    priority=st.sampled_from(["interactive", "interactive", "batch"]),
    text=st.sampled_from(TEXTS),
    queue_timeout_s=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
    holds_s=durations,
    leaves_after_s=st.none() | durations,
    is_complete=st.booleans(),
    avoid=st.sampled_from([(), (), ("chat.1",)]),
)
steps = st.one_of(
    st.tuples(st.just("visit"), visits),
    st.tuples(st.just("visit"), visits),
    st.tuples(st.just("admit"), st.tuples(st.sampled_from(NAMES), st.integers(1, 3))),
    st.tuples(st.just("withdraw"), st.sampled_from(NAMES)),
    st.tuples(st.just("close"), st.sampled_from(NAMES)),
    st.tuples(st.just("pass"), durations),
)


async def live(world: World, schedule: list[tuple[str, object]]) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(world.router.run())
        async with asyncio.TaskGroup() as visitors:
            for verb, what in schedule:
                await world.step(verb, what, visitors)
            for name in NAMES:
                world.router.admit(upstream(name, world.slots.setdefault(name, 1)))
        # Ending requests have some time; then nothing may be left.
        await asyncio.sleep(5)
        running.cancel()
    world.see_that_all_is_over()


def in_order(world: World) -> bool:
    """Return whether each client's requests got their slots as they came, priority by priority."""
    times: dict[tuple[str, Priority], list[float]] = {}
    for _, (visit, began_at_s) in sorted(world.served.items()):
        times.setdefault((visit.client, visit.priority), []).append(began_at_s)
    return all(at_s == sorted(at_s) for at_s in times.values())


def world_with(policy: Policy) -> World:
    made: list[World] = []

    def clock() -> float:
        return asyncio.get_running_loop().time()

    async def list_slots(engine: Upstream) -> list[SlotState]:
        return await made[0].list_slots(engine)

    limits = ProxySettings(policy=policy, queue_max=LINE_MAX)
    made.append(World(Router(limits, clock=clock, list_slots=list_slots)))
    return made[0]


schedules = st.lists(steps, min_size=1, max_size=25)


def without(schedule: list[tuple[str, object]], *verbs: str) -> list[tuple[str, object]]:
    return [(verb, what) for verb, what in schedule if verb not in verbs]


def unfussy(schedule: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return a schedule in which nobody would rather wait for another instance."""
    return [
        (verb, replace(what, avoid=()) if isinstance(what, Visit) else what)
        for verb, what in schedule
    ]


@given(schedules)
def test_nobody_is_lost_and_no_slot_is_held_twice(schedule: list[tuple[str, object]]) -> None:
    world = world_with("least-busy")
    world.is_strict = True
    run_in_virtual_time(live(world, unfussy(schedule)))


@given(schedules)
def test_nobody_is_lost_on_the_way_home_either(schedule: list[tuple[str, object]]) -> None:
    world = world_with("affinity")
    run_in_virtual_time(live(world, schedule))


@given(schedules)
def test_a_slot_is_not_given_away_while_the_engine_still_uses_it(
    schedule: list[tuple[str, object]],
) -> None:
    world = world_with("affinity")
    world.lag_s = 0.4
    run_in_virtual_time(live(world, without(schedule, "withdraw", "close")))


@given(schedules)
def test_a_clients_requests_keep_their_order(schedule: list[tuple[str, object]]) -> None:
    # One slot, so that most of them wait; being put back by a withdrawal may change the order.
    world = world_with("least-busy")
    world.is_strict = True
    waiting = without(unfussy(schedule), "admit", "withdraw", "close")
    run_in_virtual_time(live(world, [("admit", ("chat.1", 1)), *waiting]))
    assert in_order(world)


def test_what_the_laws_are_about_does_happen() -> None:
    """A law that is never tried holds too: see that the schedules reach every end."""
    seen: Counter[str] = Counter()

    @given(schedules)
    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    def look(schedule: list[tuple[str, object]]) -> None:
        world = world_with("affinity")
        run_in_virtual_time(live(world, schedule))
        seen.update(world.ends)

    with suppress(AssertionError):
        look()
    assert {"served", "refused", "timed out", "left", "cut"} <= set(seen)
