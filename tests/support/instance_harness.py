"""The surroundings of an instance in tests: a sender of requests, and a listener for events."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.router.lease import Activity, ProcessExit
from proxy.router.router import Router
from proxy.upstream.engine_state import SlotState
from supervisor.engine.client import Endpoint, EngineClient
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.instance import Instance, InstanceServices
from supervisor.engine.launch import Launch, clean_environment
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.state_tasks import NeedsRestart, SlotPersister
from supervisor.engine.states import State
from supervisor.errors import CorralError
from supervisor.events import EventStream
from supervisor.settings.tables import InstanceLimits, RestartPolicy

FAKE = Path(__file__).parent / "llama_server.py"
QUICK = InstanceLimits(
    load_timeout_s=20,
    warm_timeout_s=20,
    unhealthy_timeout_s=20,
    drain_timeout_s=20,
    stop_timeout_s=10,
)
PATIENT = RestartPolicy(backoff_initial_s=0.01, backoff_max_s=0.01)


def quick(**changes: float) -> InstanceLimits:
    """QUICK with other limits, also such as no settings file may hold."""
    return QUICK.model_copy(update=changes)


class RecordingTraffic(Router):
    """Records the calls of an instance; `busy` holds its drains, `now` is its pulse.

    `ends` tells of each process how it ended; each computed `computed` requests at its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.now = Activity()
        self.computed = 0
        self.ends: list[ProcessExit] = []
        self.end_reasons: list[str] = []
        self.busy = asyncio.Event()
        self.busy.set()
        self.slot_files: dict[str, SlotFile] = {}
        self.fingerprints: Callable[
            [str, Sequence[SlotState]], Mapping[int, ConversationFingerprint]
        ] = lambda *_: {}

    def add_slot_file(self, file: SlotFile, /) -> None:
        self.slot_files[file.name] = file

    def remove_slot_files(self, names: Iterable[str], /) -> None:
        for name in names:
            del self.slot_files[name]

    def conversation_owner(self, _: ConversationFingerprint, /) -> str | None:
        return None

    def conversation_fingerprints(
        self, name: str, slots: Sequence[SlotState], /
    ) -> Mapping[int, ConversationFingerprint]:
        return self.fingerprints(name, slots)

    def admit(self, *_: object) -> None:
        self.calls.append("admit")

    def withdraw(self, name: str, /) -> None:
        self._note("withdraw", name)

    def activity(self, name: str, /) -> Activity:
        assert name == "chat.0"
        return self.now

    @asynccontextmanager
    async def background_lease(self, name: str, _work: str, /) -> AsyncIterator[Callable[[], bool]]:
        assert name == "chat.0"
        yield lambda: self.now.in_flight > 0

    def note_end(self, name: str, process_exit: ProcessExit, /, *, reason: str = "") -> int:
        assert name == "chat.0"
        self.ends.append(process_exit)
        self.end_reasons.append(reason)
        return self.computed

    async def wait_idle(self, name: str, /) -> None:
        self._note("idle", name)
        await self.busy.wait()

    async def close(self, name: str, /) -> None:
        self._note("close", name)
        self.now = Activity()

    def _note(self, call: str, name: str) -> None:
        assert name == "chat.0"
        self.calls.append(call)


class NoSlotPersister:
    async def restore(self, _client: EngineClient, _run: int, /) -> int:
        return 0

    def has_prompt(self, _prompt: WarmPrompt, /) -> bool:
        return False

    async def save(self, _client: EngineClient, _run: int, /) -> None: ...


async def _needs_no_restart(_client: EngineClient, _run: int) -> bool:
    return False


async def _prepare_nothing() -> None: ...


class InstanceHarness:
    """One instance and everything around it."""

    def __init__(
        self,
        launch: Launch,
        *,
        limits: InstanceLimits = QUICK,
        policy: RestartPolicy = PATIENT,
        needs_restart: NeedsRestart = _needs_no_restart,
        prepare: Callable[[], Awaitable[None]] = _prepare_nothing,
        reduce: Callable[[FailureCause], bool] = lambda _: False,
        persister: SlotPersister | None = None,
    ) -> None:
        self.launch = launch
        self.launch_error: CorralError | None = None
        self.traffic = RecordingTraffic()
        self.events: list[tuple[str, Mapping[str, object]]] = []
        stream = EventStream(lambda event: self.events.append((event.name, event.fields)))
        self.instance = Instance(
            "chat.0",
            "chat",
            InstanceServices(
                launch=self._launch,
                traffic=self.traffic,
                admit=self.traffic.admit,
                emit=stream.emit,
                needs_restart=needs_restart,
                prepare=prepare,
                reduce=reduce,
                persister=persister or NoSlotPersister(),
            ),
            limits=limits,
            policy=policy,
        )

    def _launch(self, _run: int) -> Launch:
        if self.launch_error:
            raise self.launch_error
        return self.launch

    async def fail_probe(self) -> None:
        """Let an engine with the fault `fails-once` be probed: it gets unhealthy."""
        self.traffic.now = Activity(is_silent=True)
        await self.instance.wait(frozenset({State.UNHEALTHY}))
        self.traffic.now = Activity()

    @property
    def story(self) -> list[object]:
        """Return the states it went through."""
        return [fields["after"] for name, fields in self.events if name == "instance.state_changed"]

    @property
    def steps(self) -> list[str]:
        """Return the steps of its stops, as emitted."""
        return [_step(name, fields) for name, fields in self.events if name in _STEPS]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Instance]:
        """Serve the instance while the block runs."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.instance.serve())
            yield self.instance
            task.cancel()


_STEPS = {
    "instance.withdrawn",
    "instance.drained",
    "instance.requests_aborted",
    "instance.exit_requested",
}


def _step(name: str, fields: Mapping[str, object]) -> str:
    if name == "instance.exit_requested":
        return str(fields["how"])
    return f"{name.removeprefix('instance.')} {fields.get('in_flight', '')}".strip()


def launch_of(
    *argv: str,
    runtime: Path,
    port: int | None = None,
    library_dirs: tuple[Path, ...] = (),
    log_path: Path | None = None,
) -> Launch:
    """Return a launch of `argv` and where it shall listen."""
    endpoint = Endpoint(runtime / "chat.0.sock") if port is None else Endpoint(port=port)
    where = ["--host", str(endpoint.socket or endpoint.host), "--port", str(port or 0)]
    return Launch(
        argv=(*argv, *where),
        env=clean_environment(
            {"PATH": "/usr/bin:/bin"},
            program=Path(argv[0]),
            library_dirs=library_dirs,
            api_key="k",
            marker="test",
        ),
        cwd=Path(argv[0]).parent,
        endpoint=endpoint,
        api_key="k",
        log_path=log_path or runtime / "chat.0.log",
    )


def fake_launch(runtime: Path, *faults: str, port: int | None = None) -> Launch:
    """Return a launch of the fake engine."""
    switches = [word for fault in faults for word in ("--fault", fault)]
    return launch_of(sys.executable, str(FAKE), *switches, runtime=runtime, port=port)


def is_gone(pid: int, *, within_s: float = 2) -> bool:
    """Return whether a process, not ours, has ended or does so in time; a zombie has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


async def loading(instance: Instance) -> None:
    """Wait until it has a process, of which no event tells."""
    while instance.snapshot().pid is None:  # noqa: ASYNC110 (a few turns of the loop)
        await asyncio.sleep(0)


def zombies() -> int:
    """Return how many children of this process have ended and were not reaped."""
    children = psutil.Process().children()
    return sum(child.status() == psutil.STATUS_ZOMBIE for child in children)


def descriptors() -> int:
    """Return how many files are open in this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
