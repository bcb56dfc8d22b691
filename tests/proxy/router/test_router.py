"""Which request gets a slot and which waits, and how every wait ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.errors import ModelLoading, QueueFull, QueueTimeout, Unavailable, UpstreamShutDown
from proxy.observe.record import InFlight, InFlightRequest
from proxy.request.models import ModelInfo, ModelNames
from proxy.router.lease import Activity, Completion, Lease
from proxy.router.router import Router
from proxy.settings import BatchSettings, ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings, Upstream

BUSY = ProxySettings(policy="least-busy")


async def hold(
    stack: AsyncExitStack, router: Router, *avoid: str, loader: Loads | None = None
) -> str:
    lease = await stack.enter_async_context(
        router.lease(ask("hello"), avoid, loader.ensure_ready if loader else None)
    )
    return lease.upstream.name


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Loads:
    """A loader whose answers the test sets."""

    def __init__(self, load: Callable[[], Awaitable[None]]) -> None:
        self.load = load

    def models(self) -> list[ModelInfo]:
        return []

    def names(self) -> ModelNames:
        return ModelNames(())

    async def ensure_ready(self, _: str, /) -> None:
        await self.load()


# Who is chosen.


async def test_leases_go_where_the_fewest_are_for_each_slot() -> None:
    router = Router(BUSY)
    router.admit(upstream("small", slots=2))
    router.admit(upstream("large", slots=6))
    async with AsyncExitStack() as stack:
        names = [await hold(stack, router) for _ in range(4)]
    assert Counter(names) == {"large": 3, "small": 1}


async def test_a_lease_has_no_dictionary() -> None:
    router = Router(BUSY)
    router.admit(upstream("a"))
    async with router.lease(ask("hello")) as lease:
        assert not hasattr(lease, "__dict__")


async def test_idle_instances_take_turns() -> None:
    router = Router(BUSY)
    for name in ("a", "b", "c"):
        router.admit(upstream(name))
    names = []
    for _ in range(6):
        async with AsyncExitStack() as stack:
            names.append(await hold(stack, router))
    assert names == ["a", "b", "c", "a", "b", "c"]


async def test_an_instance_to_avoid_is_taken_only_if_there_is_no_other() -> None:
    router = Router()
    router.admit(upstream("a", slots=2))
    async with AsyncExitStack() as stack:
        assert await hold(stack, router, "a") == "a"
        router.admit(upstream("b", slots=2))
        assert [await hold(stack, router, "a") for _ in range(2)] == ["b", "b"]


async def test_the_withdrawn_and_other_models_are_never_chosen() -> None:
    router = Router()
    router.admit(upstream("a"))
    router.admit(upstream("b", model="other"))
    router.withdraw("a")
    assert not router.serves("chat")
    with pytest.raises(Unavailable, match="no instance of chat is ready"):
        async with AsyncExitStack() as stack:
            await hold(stack, router)


async def test_the_next_turn_goes_home_and_is_expected_to_be_cached() -> None:
    router = Router()
    router.admit(upstream("a", slots=2))
    router.admit(upstream("b", slots=2))
    first = ask("tell me of the sea " * 20)
    async with router.lease(first) as lease:
        home = lease.upstream.name
        router.finish(
            lease,
            Completion(Timings(0, 90, 100.0, 8, 100.0), {"role": "assistant", "content": "It is."}),
        )
    async with router.lease(ask("another")) as lease:
        assert lease.upstream.name != home
        async with router.lease(ask("tell me of the sea " * 20, "It is.", "go on")) as second:
            assert second.upstream.name == home
            assert second.expected_cached > 80
            router.finish(second, Completion(Timings(95, 10, 10.0, 8, 100.0)))
    assert {facts.upstream.name: facts.conversations for facts in router.instances()} == {
        "a": 1,
        "b": 1,
    }


# Who waits.


async def test_no_more_leases_are_held_than_there_are_slots() -> None:
    """seed 001: SlotManager assign_request, find_idle_slot.

    SequenceBatch add_sequence, remove_sequence.
    """
    router = Router()
    router.admit(upstream("a", slots=2))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, router)
        async with AsyncExitStack() as inner:
            await hold(inner, router)
            waiting = group.create_task(hold(stack, router))
            await settle()
            assert not waiting.done()
            assert router.activity("a").in_flight == 2
            assert router.queues.stats()["chat"].interactive == 1
        await settle()
        assert waiting.done()
        assert router.queues.stats()["chat"].interactive == 0


async def test_a_lease_that_is_complete_frees_its_slot_at_once() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with router.lease(ask("one")) as first:
        router.finish(first)
        router.finish(first)
        async with router.lease(ask("two")) as second:
            assert second.position == 0
            assert router.activity("a").in_flight == 2
            assert len(router.instances()[0].leases) == 1


async def test_one_more_than_may_wait_is_refused_at_once_and_told_when_to_come() -> None:
    router = Router(ProxySettings(queue_max=0))
    router.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, router)
        with pytest.raises(QueueFull, match="0 requests wait for chat") as refused:
            await hold(stack, router)
    assert refused.value.headers() == {"Retry-After": "2"}


def test_batch_requests_that_wait_fill_no_queue_of_others() -> None:
    async def main() -> None:
        settings = ProxySettings(queue_max=1, batch=BatchSettings(queue_size=1))
        router = Router(settings, clock=lambda: asyncio.get_running_loop().time())
        router.admit(upstream("a"))
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            waiting: list[asyncio.Task[Lease]] = []
            await hold(stack, router)
            for priority in ("batch", "interactive"):
                lease = router.lease(ask("hello", priority=priority))
                waiting.append(group.create_task(stack.enter_async_context(lease)))
                await settle()
                with pytest.raises(QueueFull, match="1 requests wait for chat"):
                    await stack.enter_async_context(router.lease(ask("b", priority=priority)))
            queue = router.queues.stats()["chat"]
            assert (queue.interactive, queue.batch) == (1, 1)
            for task in waiting:
                task.cancel()

    run_in_virtual_time(main())


def test_who_waited_long_is_told_when_to_come_again() -> None:
    async def main() -> None:
        router = Router()
        router.admit(upstream("a"))
        async with router.lease(ask("one")):
            with pytest.raises(QueueTimeout, match="waiting for a free slot of chat") as ended:
                async with router.lease(ask("two", queue_timeout_s=3)):
                    pass
            assert int(ended.value.headers()["Retry-After"]) >= 1
            assert asyncio.get_running_loop().time() == 3
        assert router.queues.stats()["chat"].interactive == 0

    run_in_virtual_time(main())


def test_who_waits_for_a_busy_home_goes_elsewhere_in_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        router = Router(clock=loop.time)
        router.admit(upstream("a"))
        story = "once upon a time " * 400
        async with router.lease(ask(story)):
            router.admit(upstream("b"))
            async with router.lease(ask(story, "yes", "go on")) as second:
                assert second.upstream.name == "b"
                assert 0 < second.queued_s == loop.time() < 60
                assert second.position == 1

    run_in_virtual_time(main())


def test_of_many_that_wait_a_slot_goes_to_a_conversation_of_its_instance() -> None:
    async def main() -> None:
        router = Router(clock=asyncio.get_running_loop().time)
        stories = {name: f"{name} " * 3000 for name in ("a", "b")}
        served: list[tuple[str, str]] = []

        async def go_on(name: str, number: int) -> None:
            async with router.lease(ask(stories[name], "yes", f"go on {number}")) as lease:
                served.append((name, lease.upstream.name))
                await asyncio.sleep(1)
                router.finish(lease)

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            leases: dict[str, Lease] = {}
            for name, story in stories.items():
                router.admit(upstream(name))
                leases[name] = await stack.enter_async_context(router.lease(ask(story)))
                assert leases[name].upstream.name == name
            for name in stories:
                for number in range(10):
                    group.create_task(go_on(name, number))
            await asyncio.sleep(20)  # longer than any prompt takes
            router.finish(leases["b"])
            await settle()
            assert served == [("b", "b")]
            router.finish(leases["a"])
            await settle()
            assert served == [("b", "b"), ("a", "a")]

    run_in_virtual_time(main())


async def test_a_place_in_line_and_the_wait_for_it_are_known() -> None:
    now_s = 100.0
    router = Router(clock=lambda: now_s)
    router.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        async with AsyncExitStack() as inner:
            await hold(inner, router)

            async def wait() -> None:
                lease = await stack.enter_async_context(router.lease(ask("two")))
                assert (lease.position, lease.queued_s) == (1, 4.0)

            group.create_task(wait())
            await settle()
            now_s = 104.0
            line = router.queues.stats()["chat"]
            assert (line.interactive, line.batch, line.oldest_wait_s) == (1, 0, 4.0)
            assert line.expected_wait_s > 0
        await settle()


async def test_who_leaves_gives_up_its_place_at_once() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, router)
        waiting = group.create_task(hold(stack, router))
        await settle()
        waiting.cancel()
        await settle()
        assert router.queues.stats()["chat"].interactive == 0


async def test_what_needs_no_slot_waits_in_no_line() -> None:
    router = Router(ProxySettings(queue_max=0))
    router.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, router)
        async with router.lease(ask("look", kind=EndpointKind.INFO)) as look:
            assert router.activity("a").in_flight == 2
            router.finish(look, Completion())
            assert len(router.instances()[0].leases) == 1


# A model that is not up.


async def test_whoever_waits_for_a_model_goes_on_when_it_is_admitted() -> None:
    router = Router()
    loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        waiting = group.create_task(hold(stack, router, loader=loader))
        await settle()
        assert router.queues.stats()["chat"].interactive == 1
        router.admit(upstream("a"))
        assert await waiting == "a"


async def test_the_line_is_bounded_while_a_model_loads() -> None:
    router = Router(ProxySettings(queue_max=1))
    loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        waiting = group.create_task(hold(stack, router, loader=loader))
        await settle()
        with pytest.raises(QueueFull):
            await hold(stack, router, loader=loader)
        waiting.cancel()


def test_a_load_that_outlasts_the_patience_is_told_as_a_load() -> None:
    async def main() -> None:
        router = Router()
        loader = Loads(asyncio.Event().wait)  # type: ignore[arg-type]
        for kind in (EndpointKind.CHAT, EndpointKind.INFO):
            with pytest.raises(ModelLoading, match="still loading"):
                async with router.lease(
                    ask("a", queue_timeout_s=2, kind=kind), (), loader.ensure_ready
                ):
                    pass

    run_in_virtual_time(main())


async def test_the_client_gets_the_loaders_error() -> None:
    async def fail() -> None:
        raise Unavailable("chat cannot answer: no such file")

    router = Router()
    with pytest.raises(Unavailable, match="no such file"):
        async with router.lease(ask("a"), (), Loads(fail).ensure_ready):
            pass
    assert router.queues.stats()["chat"].interactive == 0


async def test_who_waits_when_the_last_instance_goes_has_it_brought_up_again() -> None:
    router = Router()
    began = asyncio.Event()

    async def load() -> None:
        began.set()
        await asyncio.Event().wait()

    loader = Loads(load)
    router.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, router)
        waiting = group.create_task(hold(stack, router, loader=loader))
        await settle()
        assert not began.is_set()
        router.withdraw("a")
        await began.wait()
        router.admit(upstream("b"))
        assert await waiting == "b"


async def test_a_slot_that_was_promised_is_taken_back_with_its_instance() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        async with router.lease(ask("one")) as first:
            waiting = group.create_task(hold(stack, router))
            await settle()
            router.finish(first)  # the slot is promised, but who waits does not know it yet
            router.withdraw("a")
            router.admit(upstream("b"))
        assert await waiting == "b"


# Held slots.


async def test_withdrawn_instances_keep_their_leases_until_they_end() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await hold(stack, router)
        router.withdraw("a")
        assert router.count_in_flight("a") == 1
        waiting = group.create_task(router.wait_idle("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert router.count_in_flight("a") == 0


async def test_an_instance_that_is_admitted_again_still_counts_its_leases() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with AsyncExitStack() as stack:
        await hold(stack, router)
        router.withdraw("a")
        router.admit(upstream("a", slots=4))
        assert router.count_in_flight("a") == 1
        assert router.serves("chat")


async def test_closing_cuts_every_lease_and_returns_when_all_are_over() -> None:
    router = Router()
    router.admit(upstream("a", slots=3))
    ends: list[str] = []

    async def be_cut() -> None:
        with pytest.raises(UpstreamShutDown, match="a was stopped"):
            async with router.lease(ask("hello")):
                await asyncio.Event().wait()
        ends.append("cut")

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(be_cut())
        await settle()
        await router.close("a")
        assert router.count_in_flight("a") == 0
    assert ends == ["cut"] * 3


async def test_closing_twice_and_closing_the_unknown_are_nothing() -> None:
    router = Router()
    router.admit(upstream("a"))
    await router.close("a")
    await router.close("a")
    await router.wait_idle("a")
    assert not router.instances()


async def test_a_pulse_has_leases_waiting_requests_and_bytes() -> None:
    router = Router()
    router.admit(upstream("a", slots=2))
    assert router.activity("a") == Activity()
    async with router.lease(ask("one")) as first, router.lease(ask("two")):
        assert router.activity("a") == Activity(in_flight=2, awaiting_upstream=2)
        first.progress.receive(b"data: {}\n\n")
        assert router.activity("a") == Activity(in_flight=2, awaiting_upstream=1, bytes_received=10)
        first.progress.is_awaiting_upstream = True
        assert router.activity("a").awaiting_upstream == 2
    assert router.activity("a") == Activity(bytes_received=10)
    assert router.activity("unknown") == Activity()


async def test_a_ping_is_no_sign_of_life() -> None:
    router = Router()
    router.admit(upstream("a"))
    async with router.lease(ask("one")) as lease:
        lease.progress.receive(b":\n\n:\n\n")
        assert router.activity("a").bytes_received == 0


async def test_how_far_a_request_has_come_is_known() -> None:
    now_s = 10.0
    router = Router(clock=lambda: now_s)
    router.admit(upstream("a"))
    async with router.lease(ask("hello " * 100, client="ann")) as lease:
        (facts,) = router.instances()[0].leases
        assert (facts.client, facts.phase, facts.prompt_done, facts.cached) == (
            "ann",
            "prefill",
            0,
            0,
        )
        assert facts.prompt_total > 100
        lease.progress.set_prompt(64, 120, 32)
        (facts,) = router.instances()[0].leases
        assert (facts.prompt_done, facts.prompt_total, facts.cached) == (64, 120, 32)
        assert facts.prompt_step == 32
        lease.progress.set_prompt(112, 120, 32)
        (facts,) = router.instances()[0].leases
        assert facts.prompt_step == 48
        now_s = 12.0
        for _ in range(3):
            lease.progress.count_token()
        (facts,) = router.instances()[0].leases
        assert (facts.phase, facts.prompt_done, facts.decoded) == ("decode", 120, 3)
        assert (facts.began_at_s, facts.first_token_at_s) == (10.0, 12.0)


async def test_what_an_instance_is_good_for_outlasts_a_time_out_of_service() -> None:
    router = Router()
    router.admit(upstream("a"))
    assert router.instances()[0].prefill_tps == 0
    async with router.lease(ask("one")) as lease:
        router.finish(lease, Completion(Timings(0, 100, 100.0, 10, 1000.0)))
    router.withdraw("a")
    router.admit(upstream("a"))
    (instance,) = router.instances()
    assert (instance.prefill_tps, instance.decode_tps) == (1000.0, 10.0)


# Being cut.


async def test_of_two_cuts_the_first_counts() -> None:
    async def be_cut_twice() -> None:
        with InFlightRequest(InFlight()) as flight:
            flight.abort(Unavailable("first"))
            flight.abort(Unavailable("second"))
            await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="first"):
        await be_cut_twice()


async def test_a_client_that_leaves_is_not_taken_for_a_cut() -> None:
    async def wait() -> None:
        with InFlightRequest(InFlight()):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_a_timeout_of_the_blocks_own_is_not_taken_for_a_cut() -> None:
    with pytest.raises(TimeoutError), InFlightRequest(InFlight()):
        raise TimeoutError


async def test_a_client_that_leaves_as_it_is_cut_has_left() -> None:
    async def wait() -> None:
        with flight:
            await asyncio.Event().wait()

    flight = InFlightRequest(InFlight())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        await asyncio.sleep(0)
        flight.abort(Unavailable("cut"))
        task.cancel()
    assert task.cancelled()


async def test_a_block_that_ends_before_it_waits_is_not_cut() -> None:
    with InFlightRequest(InFlight()) as flight:
        flight.abort(Unavailable("late"))
    await asyncio.sleep(0)  # where it would be cancelled


def test_an_upstream_keeps_its_key_out_of_its_repr() -> None:
    assert "key" not in repr(upstream("a")).replace("cache_key", "")


def test_an_address_of_version_6_stands_in_brackets() -> None:
    assert Upstream("a", "chat", 1, None, "::1", 8081, "").own_fields[0] == "Host: [::1]:8081"
