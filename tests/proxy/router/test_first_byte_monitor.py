"""A request without a first byte leaves an instance that is not there, if another can take it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import engine as engines
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, until
from support.requests import ask, upstream
from support.upstream import Call
from support.virtual_time import run_in_virtual_time

from proxy.errors import UpstreamSilent
from proxy.request.request import ProxyRequest
from proxy.router.engine_faults import answers_health
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Upstream
from supervisor.builds.discover import Engine

Story = Callable[["RouterUnderTest"], Coroutine[Any, Any, None]]


class RouterUnderTest:
    """Instances with a slot each, some of which do not answer; each question takes a second."""

    def __init__(self, router: Router) -> None:
        self.router = router

    @asynccontextmanager
    async def lease(self, asked: ProxyRequest | None = None) -> AsyncIterator[Lease]:
        async with self.router.lease(asked or ask("hello")) as lease:
            yield lease

    async def hold(self, asked: ProxyRequest | None = None, wait_s: float = 60) -> str:
        """Hold a lease without a first byte; return whose it was."""
        async with self.lease(asked) as lease:
            await asyncio.sleep(wait_s)
            self.router.finish(lease)
        return lease.upstream.name

    @property
    def silent(self) -> set[str]:
        instances = self.router.instances()
        return {
            instance.upstream.name
            for instance in instances
            if self.router.activity(instance.upstream.name).is_silent
        }


def play(
    story: Story, gone: set[str], *names: str, slots: int = 1, asked: list[str] | None = None
) -> None:
    async def responds(upstream: Upstream) -> bool:
        if asked is not None:
            asked.append(upstream.name)
        if upstream.name in gone:
            await asyncio.sleep(1)
        return upstream.name not in gone

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        router = Router(ProxySettings(policy="round-robin"), clock=clock, responds=responds)
        for name in names:
            router.admit(upstream(name, slots=slots))
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            running = group.create_task(router.run())
            await asyncio.sleep(0.01)
            await story(RouterUnderTest(router))
            running.cancel()

    run_in_virtual_time(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_it_is_moved_after_two_seconds_and_nothing_new_goes_there() -> None:
    async def story(under_test: RouterUnderTest) -> None:
        began_at_s = now_s()
        with pytest.raises(UpstreamSilent) as caught:
            await under_test.hold()
        assert caught.value.instance == "a"
        assert now_s() - began_at_s == pytest.approx(2, abs=0.1)
        assert under_test.silent == {"a"}
        for _ in range(3):
            async with under_test.lease() as lease:
                assert lease.upstream.name == "b"
                under_test.router.finish(lease)

    play(story, {"a"}, "a", "b")


def test_each_request_is_checked_a_second_after_its_own_start() -> None:
    async def story(under_test: RouterUnderTest) -> None:
        async with under_test.lease() as first, under_test.lease() as second:
            first.is_placed = second.is_placed = True
            await asyncio.sleep(0.5)
            began_at_s = now_s()
            with pytest.raises(UpstreamSilent):
                await under_test.hold()
            assert now_s() - began_at_s == pytest.approx(2, abs=0.1)
            under_test.router.finish(first)
            under_test.router.finish(second)

    play(story, {"a"}, "a", "b", slots=2)


def test_when_it_answers_again_it_is_asked_as_before() -> None:
    gone = {"a"}

    async def story(under_test: RouterUnderTest) -> None:
        with pytest.raises(UpstreamSilent):
            await under_test.hold()
        gone.clear()
        await asyncio.sleep(3)
        assert not under_test.silent
        names = set()
        for _ in range(2):
            async with under_test.lease() as lease:
                names.add(lease.upstream.name)
                under_test.router.finish(lease)
        assert names == {"a", "b"}

    play(story, gone, "a", "b")


def test_an_instance_that_answers_may_take_its_time() -> None:
    asked: list[str] = []

    async def story(under_test: RouterUnderTest) -> None:
        async with under_test.lease() as lease:
            await asyncio.sleep(60)
            under_test.router.finish(lease)
        assert not under_test.silent

    play(story, set(), "a", "b", asked=asked)
    assert set(asked) == {"a"}
    assert len(asked) <= 60


def test_with_one_instance_no_health_is_queried() -> None:
    asked: list[str] = []

    async def story(under_test: RouterUnderTest) -> None:
        async with under_test.lease() as lease:
            await asyncio.sleep(60)
            under_test.router.finish(lease)

    play(story, {"a"}, "a", asked=asked)
    assert not asked


def test_it_is_moved_to_a_busy_instance_only_when_that_is_free() -> None:
    async def story(under_test: RouterUnderTest) -> None:
        async def other() -> None:
            async with under_test.lease() as lease:
                lease.is_placed = True
                await asyncio.sleep(10)
                under_test.router.finish(lease)

        first = asyncio.get_running_loop().create_task(under_test.hold())
        await asyncio.sleep(0.01)
        second = asyncio.get_running_loop().create_task(other())
        began_at_s = now_s()
        with pytest.raises(UpstreamSilent):
            await first
        assert 10 < now_s() - began_at_s < 14
        await second

    play(story, {"a"}, "a", "b")


def test_after_the_first_byte_no_health_is_queried() -> None:
    asked: list[str] = []

    async def story(under_test: RouterUnderTest) -> None:
        async with under_test.lease() as lease:
            lease.is_placed = True
            await asyncio.sleep(60)
            under_test.router.finish(lease)

    play(story, {"a"}, "a", "b", asked=asked)
    assert not asked


def test_no_more_are_moved_than_find_a_slot() -> None:
    moved: list[float] = []

    async def story(under_test: RouterUnderTest) -> None:
        async def answered() -> None:
            async with under_test.lease() as lease:
                assert lease.upstream.name == "b"
                lease.is_placed = True
                await asyncio.sleep(20)
                under_test.router.finish(lease)

        async def held(wait_s: float) -> None:
            try:
                await under_test.hold(wait_s=wait_s)
            except UpstreamSilent:
                moved.append(now_s())
                await answered()

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(held(30) if number % 2 == 0 else answered())
                await asyncio.sleep(0.001)

    play(story, {"a"}, "a", "b", slots=3)
    assert len(moved) == 3  # one at once, two when the 20 s of the others are over
    assert moved[0] < 3
    assert moved[1] > 19


def test_a_page_that_takes_no_slot_is_moved_too() -> None:
    look = replace(ask("hello"), kind=EndpointKind.INFO)

    async def story(under_test: RouterUnderTest) -> None:
        with pytest.raises(UpstreamSilent):
            await under_test.hold(look)

    play(story, {"a"}, "a", "b")


# With instances that speak HTTP.


async def test_a_client_is_answered_by_the_other_instance(proxy: ProxyHarness) -> None:
    async def mute(call: Call) -> None:
        await call.until_left()

    async def speak(call: Call) -> None:
        body = b'{"content":"x","timings":{}}'
        await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
        await call.send(body)

    for script, name in ((mute, "chat.1"), (speak, "chat.2")):
        await proxy.fake(script, name)
    for _ in range(2):
        async with (
            asyncio.timeout(PATIENCE_S),
            proxy.http.post("/completion", json={"prompt": "a", "n_probs": 1}) as response,
        ):
            assert response.status == 200
            assert response.headers["X-Corral-Instance"] == "chat.2"
    assert [event["status"] for event in proxy.events("request.finished")] == [200, 200]


@pytest.fixture(scope="module")
def pair(engine: Engine, tiny_model: Path) -> Iterator[Mapping[str, Path]]:
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified"]
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(engines.running(engine, tiny_model, *options))
            for name in ("chat.1", "chat.2")
        }


def is_stopped(pid: int) -> bool:
    """Whether every thread stands still; they do so one after the other."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(") ")[2].startswith("T") for stat in stats)


@asynccontextmanager
async def stopped(socket: Path) -> AsyncIterator[None]:
    """Stop an engine by SIGSTOP for the length of the block."""
    pid = next(
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(socket) in (process.info["cmdline"] or ())
    )
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: is_stopped(pid))
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_stopped_while_idle_costs_the_next_request_seconds_and_no_error(
    proxy: ProxyHarness, pair: Mapping[str, Path], *, stream: bool
) -> None:
    for name, socket in pair.items():
        proxy.router.admit(replace(engines.upstream(socket, 2), name=name))
    async with stopped(pair["chat.1"]), asyncio.timeout(PATIENCE_S):  # one took 20 s and failed
        for _ in range(4):
            async with proxy.ask(stream=stream, max_tokens=4) as response:
                assert response.status == 200
                assert b"finish_reason" in await response.read()
    assert {event["instance"] for event in proxy.events("request.finished")} == {"chat.2"}


async def test_an_engine_that_reads_a_long_prompt_answers_and_a_stopped_one_does_not(
    proxy: ProxyHarness, pair: Mapping[str, Path]
) -> None:
    one = engines.upstream(pair["chat.2"], 2)
    responds = partial(answers_health, settings=ProxySettings())
    proxy.router.admit(one)

    async def read_it() -> None:
        async with proxy.ask(messages=[{"role": "user", "content": "the cat " * 2500}]) as response:
            await response.read()

    reading = asyncio.get_running_loop().create_task(read_it())
    await until(lambda: proxy.router.count_in_flight("chat.1") == 1)
    assert await responds(one)
    reading.cancel()
    await asyncio.wait([reading])
    async with stopped(pair["chat.2"]):
        assert not await responds(one)


async def test_a_process_that_has_ended_is_not_silent(proxy: ProxyHarness) -> None:
    async def drop(call: Call) -> None:
        call.drop()

    asks = partial(answers_health, settings=ProxySettings())
    dying = await proxy.fake(drop, is_admitted=False)
    assert await asks(dying.upstream())
    await dying.stop()
    assert await asks(dying.upstream())
    assert await asks(replace(dying.upstream(), socket="/nowhere/x.sock"))
