"""A fleet of fake engines, and its reloader."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from support.instance_harness import FAKE
from support.samples import engine, machine, model

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.router.lease import Activity, ProcessExit
from proxy.router.router import Router
from proxy.upstream.upstream import Upstream
from supervisor.builds.discover import Engine
from supervisor.engine.client import Endpoint
from supervisor.engine.launch import Launch, clean_environment
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import Launches, LaunchFingerprint, ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload, ReloadResult
from supervisor.fleet.replace import Replacer, ReplicaFailure
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan
from supervisor.plan.setting import SettingsByFlag as FlagSettings
from supervisor.rpc.relay import ShardRun
from supervisor.settings.load import Loaded
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.system.paths import Directories

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


class FakeLaunches(Launches):
    """Takes a model's `args` for the program to run, or the program for its number of slots."""

    def __init__(
        self, settings: Settings, runtime: Path, programs: Mapping[int, tuple[str, ...]]
    ) -> None:
        super().__init__(settings, Directories(*[runtime] * 5))
        self._runtime = runtime
        self._programs = programs
        self._args = {name: model.args for name, model in settings.models.items()}

    def launch(self, plan: Plan, instance: str, shards: ShardRun | None = None) -> Launch:
        assert shards is None
        socket = self._runtime / f"{instance}.sock"
        program = self._programs.get(plan.slots, self._args[plan.model])
        return Launch(
            argv=(*program, "--host", str(socket)),
            env=clean_environment(
                {}, program=self._runtime, library_dirs=(), api_key="k", marker=instance
            ),
            cwd=self._runtime,
            endpoint=Endpoint(socket),
            api_key="k",
            log_path=self._runtime / f"{instance}.log",
        )


class FakePlanner(LaunchPlanner):
    """Plans without files; a model's adapted number of slots shows in its plan."""

    def __init__(
        self,
        settings: Settings,
        runtime: Path,
        adapted: Mapping[str, FlagSettings] = MappingProxyType({}),
        programs: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        super().__init__(settings, Directories(*[runtime] * 5), adapted)
        self.launches = FakeLaunches(settings, runtime, programs)

    def engine(self) -> Engine:
        return engine()

    def plan(self, model_name: str) -> Plan:
        if not self.entry(model_name).args:
            raise SettingsInvalid("it has no program")
        adapted = self.adapted.get(model_name, {})
        slots = int(adapted["parallel"].value) if adapted else 1
        chosen = {
            "ctx-size": 2048 * slots,
            "parallel": slots,
            "kv-unified": False,
            "slot-prompt-similarity": 0,
        }
        return Plan(
            model_name,
            engine(),
            model(),
            (),
            (),
            (),
            slots,
            2048 * slots,
            MemoryInputs(model(), chosen, engine()),
            adapted,
            frozenset({"parallel", "ctx-size"}),
        )

    def fingerprint(self, place: ReplicaId, _: Engine) -> LaunchFingerprint:
        file = (Path("/models/chat.gguf"), None, None)
        return LaunchFingerprint(file, (), file, None, {}, self.entry(place.model).args)


class FakeTraffic(Router):
    """Knows who is in service; `may_drain` holds every drain."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: set[str] = set()
        self.drains = asyncio.Event()
        self.may_drain = asyncio.Event()
        self.may_drain.set()

    def admit(self, upstream: Upstream, *_: object) -> None:
        self.admitted.add(upstream.name)

    def withdraw(self, name: str, /) -> None:
        self.admitted.discard(name)

    def activity(self, _: str, /) -> Activity:
        return Activity()

    @asynccontextmanager
    async def background_lease(
        self, _name: str, _work: str, /
    ) -> AsyncIterator[Callable[[], bool]]:
        yield lambda: False

    def note_end(self, _: str, process_exit: ProcessExit, /, *, reason: str = "") -> int:  # noqa: ARG002 (the name is the Router's)
        assert process_exit != "crashed"
        return 0

    async def wait_idle(self, _: str, /) -> None:
        self.drains.set()
        await self.may_drain.wait()

    async def close(self, _: str, /) -> None: ...

    def add_slot_file(self, file: SlotFile, /) -> None: ...

    def remove_slot_files(self, names: Iterable[str], /) -> None: ...

    def conversation_owner(self, _: ConversationFingerprint, /) -> str | None:
        return None

    def conversation_fingerprints(
        self, _: str, __: object, /
    ) -> dict[int, ConversationFingerprint]:
        return {}


class ReloadHarness:
    """A fleet of the model `chat`, ready, and its reloader."""

    def __init__(self, runtime: Path) -> None:
        self.events: list[tuple[str, Mapping[str, object]]] = []
        self.stream = EventStream(lambda event: self.events.append((event.name, event.fields)))
        self.traffic = FakeTraffic()
        self._runtime = runtime
        self.available_bytes = 1 << 50
        self.settings = settings(GOOD)
        self.nodes: list[list[str]] = []
        self.adapted: dict[str, FlagSettings] = {}
        self.programs: dict[int, tuple[str, ...]] = {}
        loaded = self._read()
        planner = self._planner(loaded)
        self.fleet = Fleet(planner, self.traffic, self.stream.emit)
        self.replacer = Replacer(
            self.fleet, lambda: machine(memory_available_bytes=self.available_bytes)
        )
        self.triggers = Reload(
            self.fleet,
            loaded,
            read=self._read,
            make_planner=self._planner,
            prepares=[self._prepare_nodes],
            emit=self.stream.emit,
            replacer=self.replacer,
        )

    def _planner(self, loaded: Loaded) -> FakePlanner:
        return FakePlanner(loaded.settings, self._runtime, self.adapted, self.programs)

    def _read(self, _content: bytes | None = None) -> Loaded:
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

    async def replace_beside(self, *argv: str) -> ReplicaFailure | bool:
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
