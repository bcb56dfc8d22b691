"""Changes on a fleet of fake engines: what the real one cannot be brought to show at will."""

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
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.memory.estimate import MemoryInputs
from supervisor.process.launch import Launch, clean_environment
from supervisor.reload.reload import Reload, ReloadResult
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


class FakeWorkshop(LaunchPlanner):
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

    def fingerprint(self, model_name: str, _: Engine) -> LaunchFingerprint:
        file = FileVersion(Path("/models/chat.gguf"))
        return LaunchFingerprint(file, (), file, None, {}, self.entry(model_name).args)

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


class Yard:
    """A fleet of the model `chat`, ready, and what reloads it."""

    def __init__(self, runtime: Path) -> None:
        self.events: list[tuple[str, Mapping[str, object]]] = []
        self.stream = EventStream(lambda event: self.events.append((event.name, event.fields)))
        self.traffic = FakeTraffic()
        self.available_bytes = 1 << 50
        self.settings = settings(GOOD)
        self.nodes: list[list[str]] = []
        loaded = self._read()
        planner = FakeWorkshop(loaded.settings, runtime)
        self.fleet = Fleet(planner, self.traffic, self.stream.emit)
        reload = Reload(
            self.fleet,
            loaded,
            read=self._read,
            make_planner=lambda found: FakeWorkshop(found.settings, runtime),
            prepare_nodes=self._prepare_nodes,
            emit=self.stream.emit,
            read_machine=lambda: machine(memory_available_bytes=self.available_bytes),
        )
        self.watch = ReloadTriggers(reload)

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
            self.reloads = group.create_task(self.watch.serve())
            self.fleet.command("start")
            await self.until_ready("chat.0")
            yield
            self.reloads.cancel()
            lives.cancel()

    async def until_ready(self, instance: str) -> InstanceSnapshot:
        return await self.fleet.replica(instance).instance.wait(READY)

    async def reload(self, *argv: str) -> ReloadResult:
        self.settings = settings(argv)
        done = await self.watch.ask(dry_run=False)
        assert isinstance(done, ReloadResult)
        return done

    async def begin_endless_reload(self) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload whose new instance loads for ever; return once that has begun."""
        self.settings = settings((*GOOD, "--fault", "silent-load"))
        with self.stream.listen() as listener:
            reloading = self.watch.ask(dry_run=False)
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
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    yard = Yard(tmp_path)
    async with yard.open():
        yield yard


async def test_with_room_the_new_one_serves_before_the_old_one_drains(yard: Yard) -> None:
    yard.traffic.may_drain.clear()
    done = await yard.reload(*BETTER)
    assert not done.failures
    assert yard.names() == ["chat.0~2", "chat.0"]
    assert yard.traffic.admitted == {"chat.0~2"}
    changes = [
        (fields["instance"], fields["after"])
        for name, fields in yard.events
        if name == "instance.state_changed"
    ]
    assert changes.index(("chat.0~2", "ready")) < changes.index(("chat.0", "draining"))
    old = yard.fleet.replica("chat.0")
    yard.traffic.may_drain.set()
    assert old.life
    await asyncio.wait([old.life])
    assert old.instance.snapshot().state is State.STOPPED


async def test_without_room_the_old_one_drains_first_and_starts_again(yard: Yard) -> None:
    yard.available_bytes = 0
    done = await yard.reload(*BETTER)
    assert not done.failures
    assert yard.names() == ["chat.0"]
    after_ready = yard.story("chat.0")[3:]
    assert after_ready == ["draining", "stopping", "starting", "warming", "ready"]
    replica = yard.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == BETTER


async def test_one_that_fails_in_the_place_of_another_gives_it_back(yard: Yard) -> None:
    yard.available_bytes = 0
    done = await yard.reload(*BROKEN)
    (failure,) = done.failures
    assert failure.stays
    await yard.until_ready("chat.0")
    replica = yard.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == GOOD
    assert yard.fleet.models["chat"].entry.args == GOOD


async def test_one_that_finds_no_memory_beside_the_old_one_takes_its_place(yard: Yard) -> None:
    done = await yard.reload(*GREEDY)
    assert not done.failures
    assert yard.story("chat.0~2") == ["starting", "backoff", "stopped"]
    assert yard.names() == ["chat.0"]
    assert yard.traffic.admitted == {"chat.0"}


async def test_the_first_failure_ends_the_changes_of_a_model(yard: Yard) -> None:
    yard.settings = settings(GOOD, replicas=2)
    await yard.watch.ask(dry_run=False)
    yard.settings = settings(BROKEN, replicas=2)
    done = await yard.watch.ask(dry_run=False)
    assert isinstance(done, ReloadResult)
    assert [str(failure.place) for failure in done.failures] == ["chat.0"]
    assert yard.story("chat.1~2") == []
    assert yard.traffic.admitted == {"chat.0", "chat.1"}


async def test_a_model_stopped_while_its_successor_loads_stays_down(yard: Yard) -> None:
    reloading = await yard.begin_endless_reload()
    is_over = yard.fleet.command("stop")
    done = await reloading
    assert isinstance(done, ReloadResult)
    assert not done.failures
    await yard.fleet.all_down()
    assert is_over()
    assert yard.traffic.admitted == set()


async def test_a_second_command_is_refused_and_signals_wait_as_one(yard: Yard) -> None:
    yard.available_bytes = 0
    yard.traffic.may_drain.clear()
    yard.settings = settings(BETTER)
    reloading = yard.watch.ask(dry_run=False)
    await yard.traffic.drains.wait()
    with pytest.raises(DaemonBusy, match="already running"):
        yard.watch.ask(dry_run=True)
    for _ in range(3):
        yard.watch.tell()
    told: list[object] = []
    with yard.stream.listen() as listener:
        yard.traffic.may_drain.set()
        while len(told) < 2:
            event = await listener.next()
            told += [event.fields["changed"]] if event.name == "settings.reloaded" else []
    assert told == [["chat.0"], []]
    assert reloading.done()
    assert isinstance(await yard.watch.ask(dry_run=True), ReloadResult)
    assert sum(name == "settings.reloaded" for name, _ in yard.events) == 2


async def test_the_end_of_the_daemon_ends_a_reload(yard: Yard) -> None:
    reloading = await yard.begin_endless_reload()
    yard.reloads.cancel()
    await asyncio.wait([reloading])
    assert reloading.cancelled()
    with pytest.raises(DaemonBusy, match="is stopping"):
        yard.watch.ask(dry_run=False)
    yard.fleet.command("stop")
    await yard.fleet.all_down()
    assert all(replica.instance.snapshot().pid is None for replica in yard.fleet.all_replicas())


async def test_what_cannot_be_planned_is_refused_before_anything_is_touched(yard: Yard) -> None:
    yard.settings = settings(())
    told_before = len(yard.events)
    refusal = await yard.watch.ask(dry_run=False)
    assert isinstance(refusal, CorralError)
    assert yard.events[told_before:] == [("settings.rejected", {"reason": "it has no program"})]


async def test_nodes_are_taken_in_with_the_models_or_refuse_them_all(yard: Yard) -> None:
    def with_node(name: str) -> Settings:
        return yard.settings.model_copy(update={"nodes": {name: NodeSettings(url="http://far")}})

    yard.settings = with_node("wrong")
    outcome = await yard.watch.ask(dry_run=False)
    assert isinstance(outcome, SettingsInvalid)
    assert yard.nodes == []
    yard.settings = with_node("far")
    for dry_run in (True, False):
        assert isinstance(await yard.watch.ask(dry_run=dry_run), ReloadResult)
    assert yard.nodes == [["far"]]
