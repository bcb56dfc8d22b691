"""Reloads on a fleet of fake engines, with failures that a real engine does not show at will."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.instance_harness import FAKE
from samples import engine, machine, model

from proxy.nodes.settings import NodeSettings
from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.router.instances import Activity
from proxy.upstream.upstream import Upstream
from supervisor.engine_client.endpoint import Endpoint
from supervisor.engines.discover import Engine
from supervisor.errors import CorralError, DaemonBusy, SettingsInvalid
from supervisor.events import EventStream
from supervisor.flags.plan import Plan
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint, ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.memory.estimate import MemoryInputs
from supervisor.process.launch import Launch, clean_environment
from supervisor.reload.reload import Reload, ReloadResult
from supervisor.reload.replace import Replacement, Replacer
from supervisor.reload.triggers import ReloadTriggers
from supervisor.settings.load import Loaded
from supervisor.settings.schema import ModelSettings, Settings

READY = frozenset({State.READY})
GOOD = (sys.executable, str(FAKE))
BETTER = (*GOOD, "--fault", "flood-stderr=1")
BROKEN = ("/bin/sh", "-c", "exit 3")
# Fails while its predecessor has its socket, as if that had all the memory.
GREEDY = (
    "/bin/sh",
    "-c",
    '[ ! -S chat.0.sock ] || { echo std::bad_alloc >&2; exit 1; }; exec "$@"',
    "sh",
    *GOOD,
)


class FakePlanner(LaunchPlanner):
    """Takes a model's `args` for the program to run."""

    def __init__(self, settings: Settings, runtime: Path) -> None:
        super().__init__(settings, Directories(*[runtime] * 5))
        self._runtime = runtime

    def engine(self) -> Engine:
        return engine()

    def plan(self, model_name: str) -> Plan:
        if not self.entry(model_name).args:
            raise SettingsInvalid("it has no program")
        memory_inputs = MemoryInputs(model(), {"ctx-size": 2048, "parallel": 1}, engine())
        return Plan(model_name, engine(), model(), (), (), (), 1, 2048, memory_inputs)

    def fingerprint(self, place: ReplicaId, _: Engine) -> LaunchFingerprint:
        file = FileVersion(Path("/models/chat.gguf"))
        return LaunchFingerprint(file, (), file, None, {}, self.entry(place.model).args)

    def launch(self, plan: Plan, instance: str) -> Launch:
        socket = self._runtime / f"{instance}.sock"
        return Launch(
            argv=(*self.entry(plan.model).args, "--host", str(socket)),
            env=clean_environment({}, library_dirs=(), api_key="k", marker=instance),
            cwd=self._runtime,
            endpoint=Endpoint(socket),
            api_key="k",
            log_path=self._runtime / f"{instance}.log",
        )


class FakeTraffic:
    """Knows who is in service; `may_drain` holds every drain."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()
        self.drains = asyncio.Event()
        self.may_drain = asyncio.Event()
        self.may_drain.set()

    def admit(self, upstream: Upstream, _: object, /) -> None:
        self.admitted.add(upstream.name)

    def withdraw(self, name: str, /) -> None:
        self.admitted.discard(name)

    def activity(self, _: str, /) -> Activity:
        return Activity()

    @asynccontextmanager
    async def background_lease(self, _: str, /) -> AsyncIterator[Callable[[], bool]]:
        yield lambda: False

    def ended(self, _: str, /, *, is_crash: bool) -> int:
        assert not is_crash
        return 0

    async def wait_idle(self, _: str, /) -> None:
        self.drains.set()
        await self.may_drain.wait()

    async def close(self, _: str, /) -> None: ...

    def conversation_fingerprints(
        self, _: str, __: object, /
    ) -> dict[int, ConversationFingerprint]:
        return {}


class ReloadHarness:
    """A fleet of the model `chat`, ready, and what reloads it."""

    def __init__(self, runtime: Path) -> None:
        self.events: list[tuple[str, Mapping[str, object]]] = []
        self.stream = EventStream(lambda event: self.events.append((event.name, event.fields)))
        self.traffic = FakeTraffic()
        self._runtime = runtime
        self.available_bytes = 1 << 50
        self.settings = settings(GOOD)
        self.nodes: list[list[str]] = []
        loaded = self._read()
        planner = FakePlanner(loaded.settings, runtime)
        self.fleet = Fleet(planner, self.traffic, self.stream.emit)
        self.replacer = Replacer(
            self.fleet, lambda: machine(memory_available_bytes=self.available_bytes)
        )
        reload = Reload(
            self.fleet,
            loaded,
            read=self._read,
            make_planner=lambda found: FakePlanner(found.settings, runtime),
            prepare_nodes=self._prepare_nodes,
            emit=self.stream.emit,
            replacer=self.replacer,
        )
        self.triggers = ReloadTriggers(reload)

    def _read(self) -> Loaded:
        return Loaded(self.settings, Path("corral.toml"), {})

    def _prepare_nodes(self, loaded: Loaded) -> Callable[[], None]:
        if "wrong" in loaded.settings.nodes:
            raise SettingsInvalid("the node is wrong")
        return lambda: self.nodes.append(list(loaded.settings.nodes))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            lives = group.create_task(self.fleet.serve())
            self.reloads = group.create_task(self.triggers.serve())
            self.fleet.command("start")
            await self.until_ready("chat.0")
            yield
            self.reloads.cancel()
            lives.cancel()

    async def until_ready(self, instance: str) -> InstanceSnapshot:
        return await self.fleet.replica(instance).instance.wait(READY)

    async def reload(self, *argv: str) -> ReloadResult:
        self.settings = settings(argv)
        done = await self.triggers.start(dry_run=False)
        assert isinstance(done, ReloadResult)
        return done

    async def replace_beside(self, *argv: str) -> Replacement:
        planner = FakePlanner(settings(argv), self._runtime)
        async with self.replacer.lock:
            return await self.replacer.replace_beside(
                self.fleet.replica("chat.0"), planner, planner.plan("chat")
            )

    async def begin_endless_reload(self) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload whose new instance loads for ever; return once that has begun."""
        self.settings = settings((*GOOD, "--fault", "silent-load"))
        with self.stream.listen() as listener:
            reloading = self.triggers.start(dry_run=False)
            while (await listener.next()).fields.get("instance") != "chat.0~2":
                pass
        return reloading

    def story(self, instance: str) -> list[object]:
        """Return the states an instance went through."""
        return [
            fields["after"]
            for name, fields in self.events
            if name == "instance.state_changed" and fields["instance"] == instance
        ]

    def names(self) -> list[str]:
        return [replica.name for replica in self.fleet.all_replicas()]


def settings(argv: tuple[str, ...], replicas: int = 1) -> Settings:
    table = ModelSettings(path=Path("chat.gguf"), args=argv, replicas=replicas)
    return Settings(models={"chat": table})


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ReloadHarness]:
    harness = ReloadHarness(tmp_path)
    async with harness.open():
        yield harness


async def test_with_room_the_successor_serves_before_the_old_instance_drains(
    harness: ReloadHarness,
) -> None:
    harness.traffic.may_drain.clear()
    done = await harness.reload(*BETTER)
    assert not done.failures
    assert harness.names() == ["chat.0~2", "chat.0"]
    assert harness.traffic.admitted == {"chat.0~2"}
    changes = [
        (fields["instance"], fields["after"])
        for name, fields in harness.events
        if name == "instance.state_changed"
    ]
    assert changes.index(("chat.0~2", "ready")) < changes.index(("chat.0", "draining"))
    old = harness.fleet.replica("chat.0")
    harness.traffic.may_drain.set()
    assert old.life
    await asyncio.wait([old.life])
    assert old.instance.snapshot().state is State.STOPPED


async def test_without_room_the_instance_drains_and_starts_again(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    done = await harness.reload(*BETTER)
    assert not done.failures
    assert harness.names() == ["chat.0"]
    after_ready = harness.story("chat.0")[3:]
    assert after_ready == ["draining", "stopping", "starting", "warming", "ready"]
    replica = harness.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == BETTER


async def test_a_failed_restart_returns_to_the_old_settings(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    done = await harness.reload(*BROKEN)
    (failure,) = done.failures
    assert failure.stays
    await harness.until_ready("chat.0")
    replica = harness.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == GOOD
    assert harness.fleet.models["chat"].entry.args == GOOD


async def test_a_successor_without_memory_is_started_in_place(harness: ReloadHarness) -> None:
    done = await harness.reload(*GREEDY)
    assert not done.failures
    assert harness.story("chat.0~2") == ["starting", "backoff", "stopped"]
    assert harness.names() == ["chat.0"]
    assert harness.traffic.admitted == {"chat.0"}


async def test_beside_or_not_at_all(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    story = harness.story("chat.0")
    assert await harness.replace_beside(*BETTER) == Replacement()
    assert harness.names() == ["chat.0"]
    assert harness.story("chat.0") == story
    harness.available_bytes = 1 << 50
    assert await harness.replace_beside(*BETTER) == Replacement(is_done=True)
    assert harness.traffic.admitted == {"chat.0~2"}


@pytest.mark.parametrize("argv", [BROKEN, GREEDY], ids=["broken", "short of memory"])
async def test_a_successor_that_fails_beside_an_instance_changes_nothing(
    harness: ReloadHarness, argv: tuple[str, ...]
) -> None:
    before = harness.fleet.replica("chat.0").planner
    failure = (await harness.replace_beside(*argv)).failure
    assert failure
    assert failure.stays
    assert harness.traffic.admitted == {"chat.0"}
    assert harness.fleet.replica("chat.0").planner is before
    assert harness.story("chat.0")[-1] == "ready"


async def test_a_model_stopped_while_it_is_replaced_beside_stays_down(
    harness: ReloadHarness,
) -> None:
    before = harness.fleet.replica("chat.0").planner
    async with asyncio.TaskGroup() as group:
        with harness.stream.listen() as listener:
            replacing = group.create_task(harness.replace_beside(*GOOD, "--fault", "silent-load"))
            while (await listener.next()).fields.get("instance") != "chat.0~2":
                pass
        harness.fleet.command("stop")
    assert replacing.result() == Replacement()
    await harness.fleet.all_down()
    assert harness.fleet.replica("chat.0").planner is before


async def test_a_reload_waits_for_another_change_of_what_runs(harness: ReloadHarness) -> None:
    async with harness.replacer.lock:
        reloading = harness.triggers.start(dry_run=True)
        done, _ = await asyncio.wait([reloading], timeout=0.05)
        assert not done
    assert isinstance(await reloading, ReloadResult)


async def test_the_first_failure_ends_the_changes_of_a_model(harness: ReloadHarness) -> None:
    harness.settings = settings(GOOD, replicas=2)
    await harness.triggers.start(dry_run=False)
    harness.settings = settings(BROKEN, replicas=2)
    done = await harness.triggers.start(dry_run=False)
    assert isinstance(done, ReloadResult)
    assert [str(failure.place) for failure in done.failures] == ["chat.0"]
    assert harness.story("chat.1~2") == []
    assert harness.traffic.admitted == {"chat.0", "chat.1"}


async def test_a_model_stopped_while_its_successor_loads_stays_down(harness: ReloadHarness) -> None:
    reloading = await harness.begin_endless_reload()
    is_over = harness.fleet.command("stop")
    done = await reloading
    assert isinstance(done, ReloadResult)
    assert not done.failures
    await harness.fleet.all_down()
    assert is_over()
    assert harness.traffic.admitted == set()


async def test_a_second_command_is_rejected_and_signals_are_merged(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    harness.traffic.may_drain.clear()
    harness.settings = settings(BETTER)
    reloading = harness.triggers.start(dry_run=False)
    await harness.traffic.drains.wait()
    with pytest.raises(DaemonBusy, match="already running"):
        harness.triggers.start(dry_run=True)
    for _ in range(3):
        harness.triggers.schedule()
    changed: list[object] = []
    with harness.stream.listen() as listener:
        harness.traffic.may_drain.set()
        while len(changed) < 2:
            event = await listener.next()
            changed += [event.fields["changed"]] if event.name == "settings.reloaded" else []
    assert changed == [["chat.0"], []]
    assert reloading.done()
    assert isinstance(await harness.triggers.start(dry_run=True), ReloadResult)
    assert sum(name == "settings.reloaded" for name, _ in harness.events) == 2


async def test_a_reload_stops_with_the_daemon(harness: ReloadHarness) -> None:
    reloading = await harness.begin_endless_reload()
    harness.reloads.cancel()
    await asyncio.wait([reloading])
    assert reloading.cancelled()
    with pytest.raises(DaemonBusy, match="is stopping"):
        harness.triggers.start(dry_run=False)
    harness.fleet.command("stop")
    await harness.fleet.all_down()
    assert all(replica.instance.snapshot().pid is None for replica in harness.fleet.all_replicas())


async def test_a_planning_error_changes_nothing(harness: ReloadHarness) -> None:
    harness.settings = settings(())
    events_before = len(harness.events)
    refusal = await harness.triggers.start(dry_run=False)
    assert isinstance(refusal, CorralError)
    assert harness.events[events_before:] == [
        ("settings.rejected", {"reason": "it has no program"})
    ]


async def test_an_error_of_a_node_rejects_the_whole_reload(harness: ReloadHarness) -> None:
    def with_node(name: str) -> Settings:
        return harness.settings.model_copy(update={"nodes": {name: NodeSettings(url="http://far")}})

    harness.settings = with_node("wrong")
    outcome = await harness.triggers.start(dry_run=False)
    assert isinstance(outcome, SettingsInvalid)
    assert harness.nodes == []
    harness.settings = with_node("far")
    for dry_run in (True, False):
        assert isinstance(await harness.triggers.start(dry_run=dry_run), ReloadResult)
    assert harness.nodes == [["far"]]
