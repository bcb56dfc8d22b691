"""What the dashboard shows and does of the daemon (proxy.dashboard.host.DashboardHost)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy.dashboard.host import Clients, HostEvent, HostInstance, HostModel, Verb
from proxy.errors import Unavailable, UnknownModel
from proxy.models import ModelInfo
from proxy.nodes.nodes import Nodes
from proxy.nodes.stats import NodeStats
from supervisor import __version__
from supervisor.admission.controller import AdmissionController
from supervisor.errors import DaemonBusy, NoSuchModel
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.process_memory import memory_bytes
from supervisor.host.paths import Directories, shipped
from supervisor.proxy_adapter.dashboard_instances import host_instance, host_model
from supervisor.proxy_adapter.dashboard_logs import DashboardLogs

_MEMORY_AGE_MAX_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where clients reach the proxy; `cert` is the file of its certificate."""

    url: str
    cert: str | None
    needs_key: bool


class DashboardHostAdapter:
    def __init__(
        self,
        fleet: Fleet,
        admission: AdmissionController,
        nodes: Nodes,
        events: EventStream,
        directories: Directories,
        address: Callable[[], Address],
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._nodes = nodes
        self._events = events
        self._directories = directories
        self._address = address
        self._logs = DashboardLogs(directories)
        self._memory_bytes: dict[int, int | None] = {}  # by process
        self._memory_read_at_s = float("-inf")

    @property
    def vendor(self) -> Path:
        return shipped("vendor")

    @property
    def version(self) -> str:
        return __version__

    @property
    def url(self) -> str:
        return self._address().url

    def models(self) -> dict[str, HostModel]:
        waiting, unload = self._admission.waiting(), self._admission.unload_times()
        return {
            name: host_model(model, waiting.get(name), unload.get(name))
            for name, model in self._fleet.models.items()
            if model.is_configured
        }

    def instances(self) -> list[HostInstance]:
        self._forget_memory()
        return [self._instance(one) for one in self._fleet.all_replicas()]

    def nodes(self) -> Sequence[NodeStats]:
        return self._nodes.stats()

    def observe(self, take: Callable[[HostEvent], None]) -> None:
        self._events.add_sink(take)

    def command(self, verb: Verb, model: str) -> None:
        """Begin a command.

        Raises:
            UnknownModel: The model is not configured.
            Unavailable: The daemon is stopping.
        """
        try:
            self._admission.command(verb, [model])
        except NoSuchModel as error:
            raise UnknownModel(model, list(self._fleet.models)) from error
        except DaemonBusy as error:
            raise Unavailable(f"{error.message}; {error.hint}") from error

    def log_sources(self) -> list[str]:
        return list(self._logs.sources(self._names()))

    async def log_tail(self, source: str, lines: int) -> Sequence[str]:
        return await self._logs.last_lines(source, lines, self._names())

    def log_lines(self, source: str, lines: int) -> AsyncGenerator[str, None]:
        return self._logs.lines(source, lines, self._names())

    async def clients(self, model: str | None) -> Clients:
        """Return settings of client programs; raises UnknownModel."""
        return await asyncio.to_thread(self._clients, self._nodes.models(), model)

    def _clients(self, infos: Sequence[ModelInfo], model: str | None) -> Clients:
        # Imported here: most daemons need no memory for it.
        from supervisor.proxy_adapter.dashboard_clients import (  # noqa: PLC0415
            chat_models,
            clients_of,
            facts_of,
        )

        address, models = self._address(), chat_models(infos, self._fleet.planner)
        facts = facts_of(address.url, models, model, needs_key=address.needs_key, cert=address.cert)
        return clients_of(facts, self._directories.config) if facts else Clients()

    def _names(self) -> list[str]:
        return [replica.name for replica in self._fleet.all_replicas()]

    def _instance(self, replica: Replica) -> HostInstance:
        facts, is_retiring = replica.instance.snapshot(), self._fleet.is_retiring(replica)
        rss_bytes = self._rss_bytes(facts.pid) if facts.pid else None
        return host_instance(replica, facts, rss_bytes, is_retiring=is_retiring)

    def _rss_bytes(self, pid: int) -> int | None:
        if pid not in self._memory_bytes:
            self._memory_bytes[pid] = memory_bytes(pid)
        return self._memory_bytes[pid]

    def _forget_memory(self) -> None:
        now_s = time.monotonic()
        if now_s - self._memory_read_at_s >= _MEMORY_AGE_MAX_S:
            self._memory_read_at_s = now_s
            self._memory_bytes.clear()
