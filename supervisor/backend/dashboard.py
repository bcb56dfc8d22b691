"""The dashboard's view of the daemon and its commands to it: the proxy's `DashboardHost`."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import define, field

from proxy.dashboard import host
from proxy.errors import NotFound, Unavailable, UnknownModel
from proxy.nodes.gather import NodeAnswer, Question
from proxy.nodes.nodes import Nodes, NodeStats
from proxy.observe.past import ForgottenConversation
from proxy.request.models import ModelInfo
from supervisor import __version__
from supervisor.backend.bench import BenchAdapter
from supervisor.backend.hub import HubAdapter
from supervisor.backend.machine_models import MachineModelsAdapter
from supervisor.backend.proxy_settings import Certificate
from supervisor.backend.settings_file import SettingsFileAdapter
from supervisor.backend.slot_storage import ConversationForgetter
from supervisor.clients.programs import KEY_VARIABLE, Facts, Places, ServedModel, self_signed
from supervisor.engine.log_file import follow, tail
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.errors import CorralError, DaemonBusy, NoSuchConversation, NoSuchModel
from supervisor.events import EventStream
from supervisor.fleet.devices import DeviceMonitor
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.stats import memory_bytes
from supervisor.loading.controller import AdmissionController
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.models.model_meta import makes_vectors
from supervisor.slot_store.file_index import is_prefix
from supervisor.system.paths import Directories, shipped_directory

_FAILING: Final = frozenset({State.BACKOFF, State.FAILED, State.UNHEALTHY, State.STARTING})


def _error(facts: InstanceSnapshot) -> dict[str, str] | None:
    """Return why it does not serve; a stopped instance shows no error of an earlier run."""
    if (cause := facts.cause) is None or not facts.wanted or facts.state not in _FAILING:
        return None
    return {"code": cause.code, "message": cause.sentence, "hint": cause.hint}


def log_files(directories: Directories, instances: Iterable[str]) -> dict[str, Path]:
    """Return the existing logs of the daemon and of instances."""
    found = {instance: directories.engine_log(instance) for instance in instances}
    known = {"daemon": directories.daemon_log, **found}
    return {name: path for name, path in known.items() if path.is_file()}


def find_log(directories: Directories, instances: Iterable[str], source: str) -> Path:
    """Look a log up: no name from outside becomes a path. Raises NotFound."""
    sources = log_files(directories, instances)
    if source not in sources:
        known = ", ".join(sources) or "none"
        raise NotFound(f"there is no log of {source[:80]!a}; there are: {known}")
    return sources[source]


def clients_of(
    url: str,
    models: Sequence[ServedModel],
    wanted: str | None,
    *,
    needs_key: bool,
    cert: str | None,
    config: Path,
) -> dict[str, object]:
    """Return `DashboardHost.clients`; no settings if no model answers chats. Reads their files.

    Raises UnknownModel.
    """
    # Imported here to save most daemons the memory.
    from supervisor.clients.journal import notes_of, text_of  # noqa: PLC0415
    from supervisor.clients.programs import CLIENTS  # noqa: PLC0415

    names = [model.name for model in models]
    if wanted and wanted not in names:
        raise UnknownModel(wanted, names)
    if not models:
        return {"models": [], "model": None, "key_variable": "", "clients": []}
    chosen = models[names.index(wanted) if wanted else 0]
    facts = Facts(url, tuple(models), chosen, chosen, needs_key, self_signed(cert))
    places = Places(Path.home(), dict(os.environ), config)

    def shorten(path: Path) -> str:
        home = places.home
        return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)

    clients = [
        {
            "name": client.name,
            "title": client.title,
            "files": [
                {"path": shorten(file.path), "content": text_of(file)}
                for file in client.files(facts, places)
            ],
            "notes": [*notes_of(client, facts)],
            "command": f"corral connect {client.name} --write",
            "run": client.run(facts),
        }
        for client in CLIENTS
    ]
    settings = {"model": chosen.name, "key_variable": KEY_VARIABLE, "clients": clients}
    return {"models": names, **settings}


def answers_chats(model: ModelInfo, planner: LaunchPlanner) -> bool:
    """Return whether a model answers chats, as far as this machine knows; reads files."""
    try:
        makes = model.is_local and makes_vectors(
            planner.gguf(model.id), planner.entry(model.id).flags
        )
    except CorralError:  # its start reports why
        return True
    return not makes


_MEMORY_AGE_MAX_S: Final = 2.0


@define(eq=False, slots=False)
class DashboardHostAdapter:
    machine_models: MachineModelsAdapter
    bench: BenchAdapter
    settings_file: SettingsFileAdapter
    hub: HubAdapter
    _fleet: Fleet
    _admission: AdmissionController
    _nodes: Nodes
    _events: EventStream
    _directories: Directories
    _certificate: Certificate
    _memory_usage: MemoryUsage
    _device_monitor: DeviceMonitor
    _conversations: ConversationForgetter
    _read_caches: Callable[[], Awaitable[object]]
    _memory: Mapping[str, host.HostMemory] = field(factory=dict, init=False)
    _memory_bytes: dict[int, int | None] = field(factory=dict, init=False)  # by process
    _memory_read_at_s: float = field(default=float("-inf"), init=False)

    @property
    def vendor(self) -> Path:
        return shipped_directory("vendor")

    @property
    def version(self) -> str:
        return __version__

    def models(self) -> dict[str, host.HostModel]:
        waiting, loaded = self._admission.waiting(), self._admission.loaded_states()
        found: dict[str, host.HostModel] = {}
        for name, model in self._fleet.models.items():
            if model.is_configured:
                left_s = loaded[name].unload_in_s if name in loaded else math.inf
                waits = waiting.get(name)
                found[name] = host.HostModel(
                    profile=model.entry.profile,
                    unload_in_s=left_s if math.isfinite(left_s) else None,
                    place=waits.place if waits else None,
                    leaving=waits.leaving if waits else (),
                )
        return found

    def instances(self) -> list[host.HostInstance]:
        self._refresh_memory()
        return [self._instance(replica) for replica in self._fleet.all_replicas()]

    def memory(self) -> Mapping[str, host.HostMemory]:
        self._refresh_memory()
        return self._memory

    def devices(self) -> list[dict[str, object]]:
        return [card.figures() for card in self._device_monitor.watch()]

    def nodes(self) -> Sequence[NodeStats]:
        return self._nodes.stats()

    async def ask_nodes(self, question: Question, query: Mapping[str, str]) -> list[NodeAnswer]:
        return await self._nodes.ask(question, query)

    async def caches(self) -> object:
        return await self._read_caches()

    def observe(self, take: Callable[[host.HostEvent], None]) -> None:
        self._events.add_sink(take)

    def command(self, verb: host.Verb, model: str) -> None:
        """Begin a command; raises UnknownModel, or Unavailable while the daemon stops."""
        try:
            self._admission.command(verb, [model])
        except NoSuchModel as error:
            raise UnknownModel(model, list(self._fleet.models)) from error
        except DaemonBusy as error:
            raise Unavailable(f"{error.message}; {error.hint}") from error

    def slot_files(self) -> list[host.HostSlotFile]:
        files = self._fleet.slot_files.catalogue.files()
        latest_first = sorted(files, key=lambda entry: entry.manifest.used_at, reverse=True)
        return [
            host.HostSlotFile(
                name=entry.manifest.name,
                model=entry.manifest.model,
                is_prefix=is_prefix(entry.file),
                is_encrypted=bool(entry.manifest.key_id),
                tokens=entry.manifest.tokens,
                size_bytes=entry.manifest.size_bytes,
                saved_at=entry.manifest.saved_at,
                used_at=entry.manifest.used_at,
            )
            for entry in latest_first
        ]

    async def forget(self, file: str) -> ForgottenConversation:
        try:
            gone, slots, is_in_use = await self._conversations.forget_file(file)
        except NoSuchConversation as error:
            raise NotFound(error.message) from error
        return ForgottenConversation(len(gone), slots, is_in_use)

    def log_sources(self) -> list[str]:
        return list(log_files(self._directories, self._names()))

    async def log_tail(self, source: str, lines: int) -> Sequence[str]:
        path = find_log(self._directories, self._names(), source)
        return await asyncio.to_thread(tail, path, lines)

    def log_lines(self, source: str, lines: int) -> AsyncGenerator[str, None]:
        return follow(find_log(self._directories, self._names(), source), lines)

    async def clients(
        self, model: str | None, url: str, /, *, needs_key: bool
    ) -> dict[str, object]:
        """Return settings of client programs; raises UnknownModel."""
        infos, planner = self._nodes.models(), self._fleet.planner

        cert, config = self._certificate.path, self._directories.config

        def read() -> dict[str, object]:
            models = [
                ServedModel(
                    info.id, info.context_length, sees_images="image" in info.input_modalities
                )
                for info in infos
                if answers_chats(info, planner)
            ]
            return clients_of(url, models, model, needs_key=needs_key, cert=cert, config=config)

        return await asyncio.to_thread(read)

    def _refresh_memory(self) -> None:
        now_s = time.monotonic()
        if now_s - self._memory_read_at_s >= _MEMORY_AGE_MAX_S:
            self._memory_read_at_s = now_s
            self._memory_bytes.clear()
            self._memory = self._memory_usage.by_purpose()

    def _names(self) -> list[str]:
        return [replica.name for replica in self._fleet.all_replicas()]

    def _instance(self, replica: Replica) -> host.HostInstance:
        facts, is_retiring = replica.instance.snapshot(), self._fleet.is_retiring(replica)
        pid = facts.pid
        if pid and pid not in self._memory_bytes:
            self._memory_bytes[pid] = memory_bytes(pid)
        engine = replica.plan.engine if replica.plan else None
        build = f"b{engine.build}" if engine and engine.build else None
        return host.HostInstance(
            name=facts.name,
            model=facts.model,
            state=facts.state.value,
            since_s=facts.since_s,
            run=facts.run,
            restarts=facts.restarts,
            is_retiring=is_retiring,
            pid=pid,
            rss_bytes=self._memory_bytes[pid] if pid else None,
            retry_in_s=facts.retry_in_s,
            load_progress=facts.load_progress if facts.state is State.STARTING else None,
            engine=(engine.name or build or engine.version) if engine else None,
            error=_error(facts),
            warnings=tuple(f"{warning.sentence}: {warning.hint}" for warning in facts.warnings),
        )
