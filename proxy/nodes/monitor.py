"""Monitors each node: whether it is up, a duplicate of another node, and which models it offers.

A node is polled every 5 s, and its models are admitted to the router. After two failures in a row,
or one failure after a request that it did not begin to answer, they are withdrawn until it answers
again; meanwhile the pause between polls grows to a minute. A node that reports that it is stopping
gets no more requests. In-flight requests are not cut. State changes only in methods without
`await`.

Prefixes are read so that a turn goes to the machine that has its cache. A llama-corral reports them
in digests; other servers have no such endpoint. A node with news in the last 30 s is asked twice a
second, others every 5 s, and all nodes together at most a hundred times a second.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlencode

from attrs import define, field

from proxy.auth.access import MODELS, PREFIXES
from proxy.cache.remote_prefixes import DIGEST_MAX_BYTES, Digest, UnreadableDigest, read_digest
from proxy.common.background_tasks import persist
from proxy.common.headers import DRAINING, HOP, PROCESS
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.nodes.configured import NODE_TIMES, ConfiguredNode, NodeTimes
from proxy.nodes.model_list import (
    OfferedModel,
    RemoteModel,
    Unreadable,
    count_slots,
    read_remote_models,
    served_id,
)
from proxy.observe.record import Emit
from proxy.request.models import ModelNames
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, get_request
from proxy.upstream.upstream import Upstream

NodeState = Literal["up", "down", "draining", "same"]

_TIMEOUT_S: Final = 5.0
_LARGE_BYTES: Final = 64 * 1024
_MAX_BYTES: Final = 2 * 1024**2


class NodeDraining(Exception):
    """The node is stopping: it finishes its requests, and accepts no more."""


class NodePoller:
    def __init__(self, node: ConfiguredNode, settings: ProxySettings) -> None:
        self._node = node
        self._settings = settings
        self._slots: dict[str, int] = {}

    async def poll(self) -> tuple[tuple[RemoteModel, ...], str]:
        """Read its loaded models, and those that it would load; also returns its process.

        The process is empty if the node is not a llama-corral.

        Raises:
            NodeDraining: It is stopping.
            UpstreamFailed, UpstreamTimeout, Unreadable: Its answer is not that of a node.
        """
        answer = await self._fetch(MODELS)
        if DRAINING in answer.headers:
            raise NodeDraining
        if answer.status != 200:
            raise Unreadable(f"it answers {answer.status} to /v1/models, and lists no models there")
        settings = self._node.settings
        with_loadable = settings.load == "idle"
        read = functools.partial(
            read_remote_models, answer.body, settings.models, with_loadable=with_loadable
        )
        is_large = len(answer.body) > _LARGE_BYTES
        remote_models = await asyncio.to_thread(read) if is_large else read()
        await self._read_slots(remote_models)
        return remote_models, answer.headers.get(PROCESS, "")[:64]

    async def _read_slots(self, remote_models: Sequence[RemoteModel]) -> None:
        for remote_model in remote_models:
            is_new = remote_model.id not in self._slots
            if remote_model.is_loaded and remote_model.slots is None and is_new:
                # Without autoload=false, a llama-server in router mode would load the model.
                query = urlencode({"model": remote_model.id, "autoload": "false"})
                answer = await self._fetch("/slots", query)
                if answer.status != 200:
                    return  # the endpoint is missing for all models
                slots = count_slots(answer.body) or self._node.settings.slots
                self._slots[remote_model.id] = slots

    async def _fetch(self, path: str, query: str = "") -> FetchedBody:
        request = get_request(path, query, **{HOP: "1", "Accept": "application/json"})
        return await self._node.fetch(request, self._settings, _TIMEOUT_S, _MAX_BYTES)

    def slots_of(self, remote_model: RemoteModel) -> int:
        return remote_model.slots or self._slots.get(remote_model.id, self._node.settings.slots)

    def forget_slots(self) -> None:
        self._slots.clear()


# The latest processes are known for a while after their records were removed or they stopped.
_PROCESSES_MAX: Final = 4096
# A node is idle after this many reads without news.
_IDLE_READS: Final = 60
# The node has no digests; after a restart it may have.
_PAUSE_WITHOUT_S: Final = 60.0
_READS_PER_S: Final = 100
_PREFIXES_TIMEOUT_S: Final = 5.0
# Requests may wait for the models of a node that is new.
_FIRST_PREFIXES_TIMEOUT_S: Final = 1.0


def prefixes_pause_s(unchanged: int, nodes: int, times: NodeTimes = NODE_TIMES) -> float:
    """Return the time until the next read, after `unchanged` reads without news."""
    wait_s = times.digest_s if unchanged < _IDLE_READS else times.idle_digest_s
    return max(wait_s, nodes / _READS_PER_S)


@define(eq=False, slots=False)
class PrefixReader:
    """Reads the digests of one node; `upstreams` returns its admitted models, by name."""

    _node: ConfiguredNode
    _nodes: NodeMonitors
    _upstreams: Callable[[], Mapping[str, Upstream]]
    _cursor: str = field(default="", init=False)
    _known: Mapping[str, Upstream] = field(factory=dict, init=False)
    _unchanged: int = field(default=0, init=False)

    async def serve(self) -> None:
        try:
            while True:
                has_digests = await self._read() if self._follow() else True
                wait_s = prefixes_pause_s(self._unchanged, len(self._nodes), self._nodes.times)
                await asyncio.sleep(wait_s if has_digests else _PAUSE_WITHOUT_S)
        finally:
            self._forget()

    async def read_first(self, upstreams: Mapping[str, Upstream]) -> None:
        """Read the prefixes of models before their admission, if the node answers within 1 s."""
        with suppress(UpstreamFailed, UpstreamTimeout, UnreadableDigest):
            response = await self._fetch("", _FIRST_PREFIXES_TIMEOUT_S)
            if response.status == 200:
                self._known = upstreams
                self._take(read_digest(response.body))

    async def _read(self) -> bool:
        """Read the news; return False if the node has no digests."""
        self._unchanged += 1
        try:
            response = await self._fetch(self._cursor, _PREFIXES_TIMEOUT_S)
            if response.status == 200:
                self._take(read_digest(response.body))
        except (UpstreamFailed, UpstreamTimeout):
            return True
        except UnreadableDigest:
            return False
        return response.status in {200, 204}

    async def _fetch(self, cursor: str, limit_s: float) -> FetchedBody:
        request = get_request(PREFIXES, urlencode({"after": cursor}), **{HOP: "1"})
        return await self._node.fetch(request, self._nodes.settings, limit_s, DIGEST_MAX_BYTES)

    # No method below awaits.

    def _follow(self) -> bool:
        """Start over if the node's models have changed; return whether there are any."""
        upstreams = self._upstreams()
        if upstreams.keys() != self._known.keys():
            self._forget()
        self._known = dict(upstreams)
        return bool(upstreams)

    def _take(self, digest: Digest) -> None:
        if digest.is_whole:
            self._forget()
        self._unchanged, self._cursor = 0, digest.cursor
        for upstream in self._known.values():
            if upstream.node and (hashes := digest.hashes.get(upstream.node.model)):
                self._nodes.router.cache.add_remote(upstream, hashes)

    def _forget(self) -> None:
        self._cursor = ""
        for name in self._known:
            self._nodes.router.cache.remote.forget(name)


_FAILURES: Final = 2
_RANDOM_BYTES: Final = 12


def pause_s(failures: int, chance: float, times: NodeTimes = NODE_TIMES) -> float:
    """Return the time until the next poll; `chance`, 0 to 1, varies it by up to a tenth."""
    wait_s = times.poll_s
    if failures:
        wait_s = min(times.retry_first_s * 2.0 ** min(failures - 1, 16), times.retry_max_s)
    return wait_s * (0.9 + 0.2 * chance)


class NodeMonitor:
    """Polls one node; `problem` says why it is not up."""

    def __init__(self, node: ConfiguredNode, nodes: NodeMonitors) -> None:
        self.node = node
        self.state: NodeState = "down"
        self.problem = "it was not polled yet"
        self.remote_models: tuple[RemoteModel, ...] = ()
        self._nodes = nodes
        self._poller = NodePoller(node, nodes.settings)
        self.prefixes = PrefixReader(node, nodes, lambda: self.admitted)
        self._failures = 0
        # The random word of the process that it monitors; empty if that is no llama-corral, or
        # the node is not used.
        self.process = ""
        self.admitted: dict[str, Upstream] = {}  # by instance name
        self._suspected = asyncio.Event()
        self.checked = asyncio.Event()  # set once a poll has ended

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    async def serve(self) -> None:
        while True:
            self._suspected.clear()
            await self._poll()
            if not self._suspected.is_set():
                self.checked.set()
            wait_s = pause_s(self._failures, random.random(), self._nodes.times)  # noqa: S311 (no secret)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._suspected.wait()

    def mark_suspect(self) -> None:
        """Withdraw its models and poll it now: it did not begin to answer a request."""
        self._failures = max(self._failures, _FAILURES - 1)
        self._withdraw_all()
        self.checked.clear()
        self._suspected.set()

    def poll_now(self) -> None:
        self._suspected.set()

    def stop(self, reason: str) -> None:
        """Withdraw its models and release waiting requests: it is not a node any more."""
        self._take_out("down", reason)
        self.checked.set()

    def offers(self) -> list[OfferedModel]:
        name, problem = self.node.name, None if self.is_up else self.problem
        slots = self._poller.slots_of
        return [OfferedModel(model, slots(model), name, problem) for model in self.remote_models]

    async def _poll(self) -> None:
        try:
            remote_models, process = await self._poller.poll()
        except NodeDraining:
            # Poll it soon, like after a first failure: another process may take its place.
            self._failures = 1
            if self.state != "draining":
                self._nodes.emit("node.draining", node=self.node.name)
            self._take_out("draining", "it is stopping")
        except (UpstreamFailed, UpstreamTimeout, Unreadable) as error:
            self._note_failure(str(error).removeprefix(f"{self.node.name} "))
        else:
            upstreams = self._upstreams(remote_models)
            is_new = bool(upstreams.keys() - self.admitted.keys())
            if is_new and self.state != "same":
                await self.prefixes.read_first(upstreams)
            # Nodes with long lists are admitted one after the other, with a loop step in between.
            async with self._nodes.takes_over:
                self._note_answer(remote_models, process)
                await asyncio.sleep(0)

    # No method below awaits.

    def _note_failure(self, reason: str) -> None:
        self._failures += 1
        if self.is_up and self._failures < _FAILURES:
            return
        self._poller.forget_slots()
        if self.is_up or self._failures == 1:
            self._nodes.emit("node.down", node=self.node.name, reason=reason)
        self._take_out("down", reason)

    def _note_answer(self, remote_models: tuple[RemoteModel, ...], process: str) -> None:
        self._failures = 0
        if reason := self._nodes.why_unused(process, self):
            self._set_models(())
            self._take_out("same", reason)
            return
        self._set_models(remote_models)
        if not self.is_up:
            self.state = "up"
            self._nodes.on_change()
            models = [model.id for model in remote_models if model.is_loaded]
            self._nodes.emit("node.up", node=self.node.name, models=models)
        self.process = process
        if process:
            self._nodes.note_process(process, self.node)
        upstreams = self._upstreams(remote_models)
        for name in self.admitted.keys() - upstreams.keys():
            self._nodes.router.withdraw(name)
        for name, upstream in upstreams.items():
            if self.admitted.get(name) != upstream:
                self._nodes.router.admit(upstream)
        self.admitted = upstreams

    def _upstreams(self, remote_models: Sequence[RemoteModel]) -> dict[str, Upstream]:
        local, upstreams = self._nodes.local(), {}
        for remote_model in remote_models:
            model = served_id(remote_model, local) if remote_model.is_loaded else None
            if model:
                upstream = self.node.upstream(
                    remote_model.id,
                    model,
                    self._poller.slots_of(remote_model),
                    remote_model.aliases,
                    remote_model.variants,
                    process=self.process,
                )
                upstreams[upstream.name] = upstream
        return upstreams

    def _set_models(self, remote_models: tuple[RemoteModel, ...]) -> None:
        if remote_models != self.remote_models:
            self.remote_models = remote_models
            self._nodes.on_change()

    def _take_out(self, state: NodeState, reason: str) -> None:
        self._withdraw_all()
        self.process = ""
        if (state, reason) != (self.state, self.problem):
            self.state, self.problem = state, reason
            self._nodes.on_change()

    def _withdraw_all(self) -> None:
        for name in self.admitted:
            self._nodes.router.withdraw(name)
        self.admitted = {}


class NamedTasks:
    """Runs tasks of a kind, such as `node`, by name while `serve` runs."""

    def __init__(self) -> None:
        self._works: dict[tuple[str, str], Sequence[Callable[[], Awaitable[None]]]] = {}
        self._tasks: dict[tuple[str, str], list[asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for kind, name in self._works:
                self._start(kind, name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def begin(self, kind: str, name: str, *works: Callable[[], Awaitable[None]]) -> None:
        self._works[kind, name] = works
        self._start(kind, name)

    def end(self, kind: str, name: str) -> None:
        self._works.pop((kind, name), None)
        for task in self._tasks.pop((kind, name), ()):
            task.cancel()

    def _start(self, kind: str, name: str) -> None:
        if self._group:
            works = self._works[kind, name]
            tasks = [self._group.create_task(persist(kind, work)) for work in works]
            self._tasks[kind, name] = tasks


@define(eq=False, slots=False)
class NodeMonitors:
    """The monitors of all nodes, and their common state; iterates over the monitors.

    `on_change` is called when the models or the state of a node have changed; `takes_over` is held
    while the models of a node are admitted.
    """

    router: Router
    local: Callable[[], ModelNames]
    settings: ProxySettings
    emit: Emit
    on_change: Callable[[], None]
    times: NodeTimes
    takes_over: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    tasks: NamedTasks = field(factory=NamedTasks, init=False)
    _monitors: dict[str, NodeMonitor] = field(factory=dict, init=False)
    _names: dict[str, tuple[str, ...]] = field(factory=dict, init=False)
    _leaving: dict[str, NodeMonitor] = field(factory=dict, init=False)
    _processes: OrderedDict[str, ConfiguredNode] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self.process = secrets.token_hex(_RANDOM_BYTES)  # that of this llama-corral

    def __len__(self) -> int:
        return len(self._monitors)

    def __iter__(self) -> Iterator[NodeMonitor]:
        return iter(self._monitors.values())

    def get(self, name: str) -> NodeMonitor | None:
        return self._monitors.get(name)

    def why_unused(self, process: str, monitor: NodeMonitor) -> str | None:
        """Return why a monitor must not use its node: it has the process of another one."""
        if process and process == self.process:
            return "it is this llama-corral itself"
        others = (other for other in self if other is not monitor and other.process == process)
        same = next(others, None) if process else None
        return f"it is the same as {same.node.name}" if same else None

    def node_of(self, process: str) -> ConfiguredNode | None:
        """Return the node that ran a process lately, as the settings have it."""
        return self._processes.get(process)

    def peers(self, model: str) -> list[ConfiguredNode]:
        """Return the llama-corrals that serve a model now."""
        return [
            monitor.node
            for monitor in self
            if monitor.process and any(found.model == model for found in monitor.admitted.values())
        ]

    def monitors_of(self, entry: str) -> list[NodeMonitor]:
        return [self._monitors[name] for name in self._names.get(entry, ())]

    # No method below awaits.

    def replace(self, entry: str, nodes: Sequence[ConfiguredNode], reason: str) -> None:
        """Set the machines of one node in the settings; unchanged ones keep their state.

        In-flight requests of the others are not cut; `reason` says why they get no more.
        """
        wanted = {node.name: node for node in nodes}
        for monitor in self.monitors_of(entry):
            name = monitor.node.name
            if monitor.node != wanted.get(name):
                self._leaving[name] = self._monitors.pop(name)
                monitor.stop(reason)
                self.tasks.end("node", name)
        for name, node in wanted.items():
            if name not in self._monitors:
                self._leaving.pop(name, None)
                monitor = self._monitors[name] = NodeMonitor(node, self)
                self.tasks.begin("node", name, monitor.serve, monitor.prefixes.serve)
        self._names[entry] = tuple(wanted)
        self.on_change()
        self.forget_unused()

    def note_process(self, process: str, node: ConfiguredNode) -> None:
        self._processes[process] = node
        self._processes.move_to_end(process)
        if len(self._processes) > _PROCESSES_MAX:
            self._processes.popitem(last=False)

    def forget_processes(self, node: ConfiguredNode) -> None:
        """Forget the processes of a node that the settings no longer have."""
        gone = [key for key, its in self._processes.items() if its.settings is node.settings]
        for process in gone:
            del self._processes[process]

    def leaving(self) -> list[NodeMonitor]:
        """Return the removed nodes that still answer requests."""
        self.forget_unused()
        return list(self._leaving.values())

    def forget_unused(self) -> None:
        for name, monitor in list(self._leaving.items()):
            instances = [f"{name}/{model.id}" for model in monitor.remote_models]
            if all(map(self.router.forget, instances)):
                del self._leaving[name]
