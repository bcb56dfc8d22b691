"""A request for several answers holds as many slots of one instance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from support.requests import ask, upstream
from support.slots import busy_slots
from support.virtual_time import run_in_virtual_time

from proxy.errors import QueueTimeout
from proxy.request.request import ProxyRequest, choices_of
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream


def wide(n: object = 2, client: str = "wide", queue_timeout_s: float = 60) -> ProxyRequest:
    asked = ask("hello", client=client, queue_timeout_s=queue_timeout_s)
    members = {**asked.json, "n": n}
    return replace(asked, json=members, slots=choices_of(asked.kind, members))


class Holder:
    """Requests that hold their leases until released."""

    def __init__(self, router: Router, group: asyncio.TaskGroup) -> None:
        self.router = router
        self.order: list[str] = []
        self.held: dict[str, Lease] = {}
        self._group = group
        self._done: dict[str, asyncio.Event] = {}

    async def hold(self, name: str, asked: ProxyRequest) -> None:
        self._done[name] = asyncio.Event()
        self._group.create_task(self._lease(name, asked))
        await asyncio.sleep(0.001)

    async def let_go(self, name: str) -> None:
        self._done[name].set()
        await asyncio.sleep(0.001)

    async def _lease(self, name: str, asked: ProxyRequest) -> None:
        async with self.router.lease(asked) as lease:
            self.order.append(name)
            self.held[name] = lease
            await self._done[name].wait()
            self.router.finish(lease)
        del self.held[name]


def taken(router: Router, name: str = "a") -> int:
    return next(
        len(instance.leases) for instance in router.instances() if instance.upstream.name == name
    )


def play(story: Callable[[Holder], Awaitable[None]], *upstreams: Upstream) -> None:
    async def main() -> None:
        router = Router(ProxySettings(), clock=asyncio.get_running_loop().time)
        for server in upstreams or (upstream("a", slots=2),):
            router.admit(server)
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            await story(Holder(router, group))

    run_in_virtual_time(main())


@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 2), (3, 3), (9, 4), (None, 1), ("2", 1)])
def test_it_takes_a_slot_for_each_answer_and_all_of_them_at_most(n: object, slots: int) -> None:
    async def story(holder: Holder) -> None:
        await holder.hold("one", wide(n))
        assert taken(holder.router) == slots
        assert len({lease.request_id for lease in holder.router.instances()[0].leases}) == 1
        await holder.let_go("one")
        assert taken(holder.router) == 0

    play(story, upstream("a", slots=4))


def test_it_waits_for_as_many_and_those_behind_it_do_not_take_them_away() -> None:
    async def story(holder: Holder) -> None:
        await holder.hold("first", ask("a"))
        await holder.hold("second", ask("b"))
        await holder.hold("wide", wide())
        for number in range(3):
            await holder.hold(f"narrow {number}", ask("c"))
        await holder.let_go("first")
        assert taken(holder.router) == 1
        await holder.let_go("second")
        assert holder.order == ["first", "second", "wide"]
        await holder.let_go("wide")
        for number in range(3):
            await holder.let_go(f"narrow {number}")
        assert len(holder.order) == 6

    play(story)


def test_two_of_them_never_wait_for_each_other() -> None:
    async def story(holder: Holder) -> None:
        await holder.hold("first", ask("a"))
        await holder.hold("one", wide())
        await holder.hold("other", wide(client="b"))
        await holder.let_go("first")
        assert holder.order == ["first", "one"]
        await holder.let_go("one")
        assert holder.order == ["first", "one", "other"]
        await holder.let_go("other")

    play(story)


def test_those_behind_go_on_when_it_gives_up() -> None:
    async def give_up(router: Router) -> None:
        with pytest.raises(QueueTimeout):
            async with router.lease(wide(queue_timeout_s=1)):
                pass

    async def story(holder: Holder) -> None:
        await holder.hold("first", ask("a"))
        giving_up = asyncio.get_running_loop().create_task(give_up(holder.router))
        await asyncio.sleep(0.001)
        await holder.hold("narrow", ask("b"))
        assert holder.order == ["first"]
        await giving_up
        await asyncio.sleep(0.001)
        assert holder.order == ["first", "narrow"]
        await holder.let_go("narrow")
        await holder.let_go("first")

    play(story)


def test_others_use_the_other_instance_while_it_waits_for_one() -> None:
    async def story(holder: Holder) -> None:
        for number in range(4):
            await holder.hold(f"{number}", ask(str(number)))
        on_a = [name for name, lease in holder.held.items() if lease.upstream.name == "a"]
        on_b = [name for name in holder.held if name not in on_a]
        await holder.hold("wide", wide())
        await holder.hold("narrow", ask("c"))
        await holder.let_go(on_a[0])
        assert "narrow" not in holder.order
        await holder.let_go(on_b[0])
        assert holder.held["narrow"].upstream.name == "b"
        await holder.let_go(on_a[1])
        assert holder.held["wide"].upstream.name == "a"
        for name in list(holder.held):
            await holder.let_go(name)

    play(story, upstream("a", slots=2), upstream("b", slots=2))


def test_all_its_slots_are_looked_after_when_its_client_leaves() -> None:
    async def main() -> None:
        counts = [2, 1, 0]
        clock = asyncio.get_running_loop().time

        async def list_slots(_: Upstream) -> list[SlotState]:
            return busy_slots(counts.pop(0) if len(counts) > 1 else counts[0])

        router = Router(ProxySettings(), clock=clock, list_slots=list_slots)
        router.admit(upstream("a", slots=2))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(router.run())
            await asyncio.sleep(0)
            async with router.lease(wide()):
                pass
            seen = [taken(router)]
            for _ in range(8):
                await asyncio.sleep(0.05)
                seen.append(taken(router))
            running.cancel()
        assert list(dict.fromkeys(seen)) == [2, 1, 0]

    run_in_virtual_time(main())


async def test_each_of_its_slots_is_followed() -> None:
    router = Router(ProxySettings())
    router.admit(replace(upstream("a", slots=2), can_name_slots=True))
    async with router.lease(wide()) as lease:
        slot_map = [slot.slot for slot in lease.slots]
        assert None not in slot_map
        assert len({entry.id_slot for entry in slot_map if entry}) == 2


@pytest.mark.parametrize(
    "kind",
    [
        EndpointKind.CHAT,
        EndpointKind.COMPLETION,
        EndpointKind.LLAMA_COMPLETION,
        EndpointKind.RESPONSES,
    ],
)
@pytest.mark.parametrize(
    ("members", "count"),
    [
        ({"n": 2}, 2),
        ({"n_cmpl": 3}, 3),
        ({"n": 2, "n_cmpl": 4}, 4),
        ({"n": 2.0}, 2),
        ({"n": 1e300}, 4096),
        ({"n": True}, 1),
        ({"n": None}, 1),
        ({"n": "3"}, 1),
        ({"n": -5}, 1),
        ({}, 1),
    ],
)
def test_how_many_answers_are_asked_for(
    kind: EndpointKind, members: dict[str, object], count: int
) -> None:
    assert choices_of(kind, members) == count


@pytest.mark.parametrize(
    "kind",
    [
        EndpointKind.MESSAGES,
        EndpointKind.EMBED_OR_RERANK,
        EndpointKind.TRANSCRIPTION,
        EndpointKind.INFO,
    ],
)
def test_other_pages_give_one_answer(kind: EndpointKind) -> None:
    assert choices_of(kind, {"n": 4, "n_cmpl": 4}) == 1
