"""The daemon: builds all parts, runs them, and shuts them down in order.

A shutdown (SIGINT, SIGTERM, control socket) drains the proxy, then stops the engines. A second
request shortens the wait to 5 s, a third ends it. SIGHUP reloads the settings.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Final

from proxy.app import build_app
from proxy.errors import ListenFailed
from proxy.failures import FAILURES, persist
from proxy.jobs.jobs import JobStorage
from proxy.metrics.prometheus import Metrics
from proxy.models import PrefillResult
from proxy.nodes.nodes import Nodes
from proxy.router.router import Router
from proxy.server import Server
from proxy.threads import worker_threads
from supervisor import __version__
from supervisor.adaptive.apply import ChangeApplier
from supervisor.adaptive.controller import AdaptiveController
from supervisor.adaptive.engine_processes import engine_processes, measured_speeds
from supervisor.adaptive.layer_mover import LayerMover
from supervisor.adaptive.slots import SlotDecider
from supervisor.adaptive.thread_decider import ThreadDecider
from supervisor.adaptive.values import AdaptedValues
from supervisor.admission.controller import AdmissionController
from supervisor.admission.memory_usage import MemoryUsage
from supervisor.admission.model_state import Waiting
from supervisor.control import server as server_module
from supervisor.control.balance_status import balance_status, moved_layers
from supervisor.control.messages import (
    BalanceStatus,
    DaemonStatus,
    InstanceStatus,
    ModelStatus,
    MovedLayers,
    TrialStatus,
)
from supervisor.control.status import (
    instance_status,
    model_status,
    node_status,
    weight_statuses,
)
from supervisor.control.trial_status import trial_status
from supervisor.control.worker_status import worker_statuses
from supervisor.engines.discover import Engine
from supervisor.errors import AccessDenied, CorralError
from supervisor.events import EventStream
from supervisor.fleet import cache_commands
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reductions import Reductions
from supervisor.fleet.stats import StatsReader
from supervisor.host.lock import lock_runtime_dir, this_daemon, write_owner
from supervisor.host.paths import Directories
from supervisor.process.orphans import kill_orphans
from supervisor.process.private_runtime import is_in_use
from supervisor.proxy_adapter.engine_reader import EngineReaderAdapter
from supervisor.proxy_adapter.model_control import ModelControlAdapter
from supervisor.proxy_adapter.model_loader import ModelLoaderAdapter
from supervisor.proxy_adapter.prompt_warmer import PromptWarmerAdapter
from supervisor.proxy_adapter.router_events import RouterEvents
from supervisor.proxy_adapter.settings import checked, read_nodes
from supervisor.proxy_adapter.shard_metrics import shard_metrics
from supervisor.reload.reload import Reload, ReloadResult
from supervisor.reload.replace import Replacer
from supervisor.reload.triggers import ReloadTriggers
from supervisor.request_record.files import RecordFiles
from supervisor.request_record.recorder import RequestRecorder
from supervisor.settings.load import Loaded
from supervisor.shards.layer_shares import LayerShares
from supervisor.slot_store.config import clean_up
from supervisor.slot_store.manifest import Manifest
from supervisor.trial.storage import TrialStore
from supervisor.trial.trials import Trials
from supervisor.warmup.prompts import WarmPrompt
from supervisor.workers.address import free_port
from supervisor.workers.known import KnownWorkers
from supervisor.workers.pool import WorkerPool

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# Time left after the second and the third request to shut down.
_FORCED_DRAIN_S: Final = (5.0, 0.0)


class Daemon:
    """One daemon; construct it on a running loop, and `run` it once.

    `reread` reads the sources of the settings again, in a thread; it raises CorralError.
    """

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        directories: Directories,
        events: EventStream,
    ) -> None:
        self._directories = directories
        self._events = events
        FAILURES.report_to(events.emit)
        proxy = checked(loaded.settings.proxy)
        self._metrics = Metrics(proxy, events.emit)
        router_events = RouterEvents()
        self._router = Router(proxy, router_events, self._metrics.emit)
        self._stats = StatsReader()
        adapted = AdaptedValues()
        self._known_workers = KnownWorkers(free_port)
        reductions = Reductions()

        def make_planner(found: Loaded) -> LaunchPlanner:
            return LaunchPlanner(
                found.settings,
                directories,
                adapted.of,
                known_workers=self._known_workers,
                reductions=reductions,
            )

        self._fleet = Fleet(
            make_planner(loaded),
            self._router,
            events.emit,
            on_change=lambda: self._admission.wake(),  # noqa: PLW0108 (made below)
        )
        memory_usage = MemoryUsage(self._fleet)
        self._admission = AdmissionController(self._fleet, self._router, events.emit, memory_usage)
        replacer = Replacer(self._fleet)
        self._adaptive = AdaptiveController(
            self._fleet,
            self._router,
            ChangeApplier(self._fleet, replacer, memory_usage, adapted, events.emit),
            adapted,
            events.emit,
            [
                SlotDecider(),
                ThreadDecider(
                    functools.partial(engine_processes, self._fleet),
                    measured_speeds(self._fleet),
                    is_measuring=functools.partial(is_in_use, directories),
                ),
            ],
            is_memory_wanted=lambda: bool(self._admission.waiting()),
        )
        self._layer_mover = LayerMover(
            self._fleet, replacer, LayerShares(directories.layer_shares), events.emit, self._now_s
        )
        self._metrics.add(lambda: shard_metrics(self._layer_mover.runs()))
        self._reload = Reload(
            self._fleet,
            loaded,
            read=reread,
            make_planner=make_planner,
            prepare_nodes=self._prepare_nodes,
            emit=events.emit,
            replacer=replacer,
        )
        self._triggers = ReloadTriggers(self._reload)
        self._workers = WorkerPool(
            self._known_workers, self._engine, directories, events.emit, self._fleet.worker_ended
        )
        self._apply_workers(loaded)
        self._recorder = RequestRecorder(
            RecordFiles(directories.request_record), events, self._is_recorded
        )
        self._trials = Trials(self._fleet, self._router.in_flight, TrialStore(directories.trials))
        events.add_sink(self._trials.observe)
        self._nodes = self._make_nodes()
        router_events.connect(self._fleet, self._admission, self._nodes)
        self._server = self._make_server()
        self._started_at_s = self._stopping_at_s = self._now_s()
        self._shutdown_requests = 0
        self._shutdown = asyncio.Event()
        self._drain_timeout: asyncio.Timeout | None = None

    def _make_nodes(self) -> Nodes:
        settings = self._reload.loaded.settings
        model_loader = ModelLoaderAdapter(self._fleet, self._admission, self._events)
        return Nodes(
            read_nodes(settings.nodes),
            self._router,
            model_loader,
            settings.proxy,
            self._events.emit,
            model_loader.created,
        )

    def _prepare_nodes(self, loaded: Loaded) -> Callable[[], None]:
        nodes = read_nodes(loaded.settings.nodes)

        def apply() -> None:
            self._nodes.set_nodes(nodes)
            self._apply_workers(loaded)

        return apply

    def _engine(self) -> Engine:
        return self._fleet.planner.engine()

    def _apply_workers(self, loaded: Loaded) -> None:
        supervisor = loaded.settings.supervisor
        self._workers.apply(loaded.settings.workers, supervisor.restart, supervisor.drain_timeout_s)

    def _is_recorded(self, model: str) -> bool:
        settings = self._reload.loaded.settings
        return settings.supervisor.record_requests and model in settings.models

    def _make_server(self) -> Server:
        settings = self._reload.loaded.settings
        warmer = PromptWarmerAdapter(self._fleet, self._router, self._events.emit)
        storage = JobStorage(self._directories.jobs, settings.jobs)
        app = build_app(
            self._router,
            self._nodes,
            settings.proxy,
            self._metrics,
            warmer,
            storage,
            EngineReaderAdapter(self._fleet),
            ModelControlAdapter(self._fleet, self._admission, self._events),
        )
        return Server(app, settings.proxy)

    async def run(self, models: Sequence[str], report: Callable[[], None]) -> None:
        """Start models and serve until shutdown; `report` once clients and commands are answered.

        Raises:
            CorralError: Another daemon runs, a directory or the address cannot be used, or a model
                is not configured.
        """
        for name in models:
            self._fleet.planner.entry(name)
        with lock_runtime_dir(self._directories), self._signal_handlers():
            asyncio.get_running_loop().set_default_executor(worker_threads(None, "worker"))
            self._clean_up()
            async with self._listening(), self._control_socket(), self._running():
                if models:
                    self._admission.command("start", models)
                self._emit_started()
                report()
                await self._shutdown.wait()

    def _clean_up(self) -> None:
        """Remove what a daemon that was killed left behind."""
        kill_orphans(self._directories.runtime, self._events.emit)
        clean_up(self._fleet.planner.slot_persistence, self._events.emit)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run all parts; after the block nothing is loaded or reloaded, and the rest is stopped."""
        async with asyncio.TaskGroup() as group:
            serving = [
                group.create_task(serve())
                for serve in (self._fleet.serve, self._router.run, self._nodes.serve)
            ]
            reload = group.create_task(self._triggers.serve())
            admission = group.create_task(persist("admission", self._admission.serve))
            adaptive = group.create_task(persist("adaptive", self._adaptive.serve))
            recorder = group.create_task(persist("request record", self._recorder.serve))
            trials = group.create_task(persist("trials", self._trials.serve))
            jobs = group.create_task(persist("jobs", self._server.serve))
            layers = group.create_task(persist("balance", self._layer_mover.serve))
            workers = group.create_task(persist("workers", self._workers.serve))
            yield
            jobs.cancel()
            layers.cancel()
            adaptive.cancel()
            reload.cancel()
            admission.cancel()
            await self._stop()
            for task in (*serving, recorder, trials, workers):
                task.cancel()

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        try:
            await self._server.start()
        except ListenFailed as error:
            raise AccessDenied(error.message, hint=error.hint) from error
        try:
            write_owner(self._directories.state_file, this_daemon(__version__, self._server.url))
            yield
        finally:
            await self._server.close()

    def _control_socket(self) -> AbstractAsyncContextManager[None]:
        return server_module.serve(self, self._events, self._directories.control_socket)

    def _emit_started(self) -> None:
        self._events.emit(
            "daemon.started",
            version=__version__,
            url=self._server.url,
            control=str(self._directories.control_socket),
            settings=str(self._reload.loaded.path) if self._reload.loaded.path else None,
        )

    async def _stop(self) -> None:
        """Drain the proxy, abort requests that take too long, save slots, stop the engines."""
        limits = self._reload.loaded.settings.supervisor
        async with self._deadline(limits.drain_timeout_s):
            await self._server.drain(limits.drain_timeout_s)
        await self._server.close()
        self._fleet.command("stop")
        saving_s = limits.slot_save_timeout_s if limits.persist_slots else 0
        async with self._deadline(2 * limits.stop_timeout_s + saving_s):
            await self._fleet.all_down()
        duration_s = round(self._now_s() - self._stopping_at_s, 3)
        self._events.emit("daemon.stopped", duration_s=duration_s)

    @asynccontextmanager
    async def _deadline(self, limit_s: float) -> AsyncIterator[None]:
        """Limit the block to this time, or to less after repeated requests to shut down."""
        is_over = self._shutdown_requests > len(_FORCED_DRAIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if is_over else limit_s) as self._drain_timeout:
                yield
        self._drain_timeout = None

    def shutdown(self, reason: str) -> None:
        """Begin to shut down; a repeated call shortens the wait."""
        self._shutdown_requests += 1
        if self._shutdown_requests == 1:
            self._stopping_at_s = self._now_s()
            self._events.emit("daemon.stopping", reason=reason)
            self._shutdown.set()
        elif self._drain_timeout and not self._drain_timeout.expired():
            left_s = _FORCED_DRAIN_S[min(self._shutdown_requests - 2, len(_FORCED_DRAIN_S) - 1)]
            self._drain_timeout.reschedule(self._now_s() + left_s)

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.shutdown, f"{number.name} received")
        loop.add_signal_handler(signal.SIGHUP, self._triggers.schedule)
        try:
            yield
        finally:
            _ignore_signals(loop)

    # supervisor.control.server.Service

    def command(self, verb: str, models: Sequence[str]) -> Callable[[], bool]:
        return self._admission.command(verb, models)

    def reload(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        return self._triggers.start(dry_run=dry_run)

    def save_slots(self, models: Sequence[str]) -> asyncio.Task[list[Manifest]]:
        replicas = [self._fleet.replica(one.name) for one in self._fleet.instances(models)]
        return self._fleet.spawn(
            cache_commands.save(replicas, self._fleet.planner.slot_persistence)
        )

    def warm(
        self, model: str, prompt: WarmPrompt
    ) -> asyncio.Task[list[PrefillResult] | CorralError]:
        replicas = [self._fleet.replica(one.name) for one in self._fleet.instances([model])]
        return self._fleet.spawn(cache_commands.warm(replicas, prompt, self._router))

    async def refresh(self) -> None:
        await self._stats.refresh(replica.instance for replica in self._fleet.all_replicas())

    def status(self) -> DaemonStatus:
        path, waiting = self._reload.loaded.path, self._admission.waiting()
        return {
            "pid": os.getpid(),
            "version": __version__,
            "url": self._server.url,
            "up_s": self._now_s() - self._started_at_s,
            "stopping": self._shutdown_requests > 0,
            "config": str(path) if path else None,
            "models": [
                self._model_status(model, waiting.get(model.entry.name))
                for model in self._fleet.models.values()
            ],
            "nodes": [node_status(stats) for stats in self._nodes.stats()],
            "weights": weight_statuses(self._router.instances()),
            "workers": worker_statuses(
                self._reload.loaded.settings, self._known_workers, self._workers
            ),
        }

    def trials(self) -> list[TrialStatus]:
        found = ((model, self._trials.of(name)) for name, model in self._fleet.models.items())
        statuses = (
            trial_status(model, trial, self._trials.age_s(trial), self._memory_bytes)
            for model, trial in found
            if trial
        )
        return [status for status in statuses if status]

    def balances(self) -> list[BalanceStatus]:
        now_s = self._now_s()
        return [
            balance_status(replica.place.model, replica.name, run, now_s)
            for replica, run in self._layer_mover.runs()
        ]

    def balance(self, model: str) -> asyncio.Task[MovedLayers | CorralError]:
        return self._fleet.spawn(self._balance(model))

    async def _balance(self, model: str) -> MovedLayers | CorralError:
        moved = await self._layer_mover.move(model)
        return moved if isinstance(moved, CorralError) else moved_layers(moved)

    def _memory_bytes(self, replica: Replica) -> int | None:
        facts = replica.instance.snapshot()
        return self._stats.of(facts).memory_bytes if facts.pid else None

    def _model_status(self, model: Model, waiting: Waiting | None) -> ModelStatus:
        return model_status(
            model, [self._instance_status(one) for one in model.all_replicas], waiting
        )

    def _instance_status(self, replica: Replica) -> InstanceStatus:
        facts = replica.instance.snapshot()
        busy, is_retiring = self._router.in_flight(facts.name), self._fleet.is_retiring(replica)
        stats = self._stats.of(facts)
        return instance_status(facts, replica.plan, stats, busy, is_retiring=is_retiring)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore signals while the process exits with code 0.

    They are blocked meanwhile, in worker threads always: a loop that removes a handler restores the
    default, which kills.
    """
    numbers = {*_SIGNALS, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
