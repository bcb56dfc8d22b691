"""Constructs the parts of a daemon and connects them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from proxy.app import App, Backend
from proxy.batches.jobs import JobStorage
from proxy.endpoints.prometheus import Metrics
from proxy.http.tls import server_context
from proxy.nodes.nodes import Nodes
from proxy.router.router import Router
from proxy.server import Server
from supervisor.autoscale.apply import AdaptiveController, ChangeApplier
from supervisor.autoscale.layer_mover import LayerMover
from supervisor.autoscale.slots import AdaptedValues, SlotDecider
from supervisor.autoscale.threads import ThreadDecider, engine_processes, measured_speeds
from supervisor.backend.dashboard import Address, DashboardHostAdapter
from supervisor.backend.models import (
    EngineReaderAdapter,
    LoadForecasterAdapter,
    ModelControlAdapter,
    ModelLoaderAdapter,
)
from supervisor.backend.ollama import ModelFilesAdapter, OllamaHostAdapter
from supervisor.backend.proxy_settings import (
    check_proxy_settings,
    keyless_addresses,
    read_nodes,
    tls_context,
)
from supervisor.backend.request_records import (
    RecordsAdapter,
    shard_metrics,
)
from supervisor.backend.slot_storage import (
    ConversationForgetter,
    PrefixFiles,
    PromptWarmerAdapter,
    slot_file_metrics,
)
from supervisor.backend.usage import UsageEngines, UsageRecorder, usage_metrics
from supervisor.builds.discover import Engine
from supervisor.daemon.desktop import DesktopKey
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.orphans import is_in_use
from supervisor.errors import HistoryUnavailable
from supervisor.events import EventStream
from supervisor.experiments.canaries import Canaries, with_canaries
from supervisor.experiments.capture import Captures
from supervisor.experiments.trials import Trials
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model_entries import Reductions
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload, ReloadTriggers
from supervisor.fleet.replace import Replacer
from supervisor.fleet.stats import StatsReader
from supervisor.loading.controller import AdmissionController
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.plan.plan import CanaryTrial
from supervisor.records.store import RecordStore
from supervisor.records.usage import Query
from supervisor.records.writer import Records
from supervisor.rpc.address import KnownWorkers, free_port
from supervisor.rpc.pool import WorkerPool
from supervisor.rpc.shards import LayerShares
from supervisor.service.hook_commands import hook_directory
from supervisor.service.hooks import Hooks
from supervisor.service.notifier import ServiceEnvironment
from supervisor.settings.load import Loaded
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories


class DaemonParts:
    """All parts of one daemon. Constructed on a running loop; `Daemon` runs them.

    `reread` reads the settings from their sources again, in a thread; it raises CorralError.
    """

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        directories: Directories,
        events: EventStream,
        environment: ServiceEnvironment,
        desktop_key: DesktopKey | None = None,
    ) -> None:
        self.directories = directories
        self.desktop_key = desktop_key
        self.events = events
        self.notifier = environment.notifier
        proxy = check_proxy_settings(loaded.settings.proxy)
        self._tls = proxy.tls
        self.metrics = Metrics(proxy, events.emit)
        self.router = Router(proxy, self.metrics.emit)
        self.stats = StatsReader(functools.partial(self.metrics.engine_values, self.router))
        self._adapted = AdaptedValues()
        self._canary_trials: dict[str, CanaryTrial] = {}
        self._reductions = Reductions()
        self.known_workers = KnownWorkers(free_port)
        self.fleet = Fleet(self._planner(loaded), self.router, events.emit)
        self._prefix_files = PrefixFiles(self.fleet, self.router, events.emit)
        self.conversations = ConversationForgetter(self.fleet, self.router)
        memory_usage, replacer = MemoryUsage(self.fleet), Replacer(self.fleet)
        self.admission = AdmissionController(self.fleet, self.router, events.emit, memory_usage)
        events.add_sink(self.admission.observe)
        self.adaptive = self._make_adaptive(replacer, memory_usage)
        self.layer_mover = self._make_layer_mover(replacer)
        self.reload = self._make_reload(loaded, reread, replacer)
        self.triggers = ReloadTriggers(self.reload, self.notifier.reloading)
        self.workers = WorkerPool(
            self.known_workers, self._engine, directories, events.emit, self.fleet.worker_ended
        )
        self._apply_workers(loaded)
        events.add_sink(self._prefix_files.observe)
        self.records = self._make_records()
        self._make_trials()
        events.add_sink(self.notifier.observe)
        self.nodes = self._make_nodes()
        self.usage = self._make_usage()
        self.app = self._make_app()
        self.captures = Captures(self.app.capture, lambda: self.fleet.planner, events.emit)
        self.server = Server(self.app, environment.sockets)
        self.keyless = () if self.desktop_key else keyless_addresses(self.settings.proxy)
        self.hooks = self._make_hooks()
        events.add_sink(self.hooks.observe)

    @property
    def tls_cert(self) -> Path | None:
        return self._tls.cert if self._tls else None

    @property
    def settings(self) -> Settings:
        """The current settings; a reload replaces them."""
        return self.reload.loaded.settings

    def _planner(self, loaded: Loaded) -> LaunchPlanner:
        return LaunchPlanner(
            with_canaries(loaded.settings, self._canary_trials),
            self.directories,
            self._adapted.values_of,
            known_workers=self.known_workers,
            reductions=self._reductions,
        )

    def _make_adaptive(self, replacer: Replacer, memory_usage: MemoryUsage) -> AdaptiveController:
        fleet, emit = self.fleet, self.events.emit
        threads = ThreadDecider(
            functools.partial(engine_processes, fleet),
            measured_speeds(fleet),
            is_measuring=functools.partial(is_in_use, self.directories),
        )
        return AdaptiveController(
            fleet,
            self.router,
            ChangeApplier(fleet, replacer, memory_usage, self._adapted, emit),
            self._adapted,
            emit,
            [SlotDecider(), threads],
            is_memory_wanted=lambda: bool(self.admission.waiting()),
        )

    def _make_layer_mover(self, replacer: Replacer) -> LayerMover:
        shares = LayerShares(self.directories.layer_shares)
        now_s = asyncio.get_running_loop().time
        mover = LayerMover(self.fleet, replacer, shares, self.events.emit, now_s)
        self.metrics.add(lambda: shard_metrics(mover.runs()))
        self.metrics.add(lambda: slot_file_metrics(self.fleet.slot_files.catalogue.files()))
        return mover

    def _make_reload(
        self, loaded: Loaded, reread: Callable[[], Loaded], replacer: Replacer
    ) -> Reload:
        return Reload(
            self.fleet,
            loaded,
            read=reread,
            make_planner=self._planner,
            prepare_nodes=self._prepare_nodes,
            emit=self.events.emit,
            replacer=replacer,
        )

    def _make_records(self) -> Records:
        def history_limits() -> tuple[int, float] | None:
            found = self.settings.history
            return (found.max_bytes, found.max_age_days) if found.enabled else None

        def is_recorded(model: str) -> bool:
            return self.settings.supervisor.record_requests and model in self.settings.models

        store = RecordStore(self.directories.data)
        records = Records(store, self.events.emit, history_limits, is_recorded)
        self.events.add_sink(records.observe)
        return records

    def _make_trials(self) -> None:
        """Make the trials of profiles and the canaries of engines."""
        emit = self.events.emit
        self.trials = Trials(self.fleet, self.router.count_in_flight, self.directories.trials)
        self.events.add_sink(self.trials.observe)
        self.canaries = Canaries(
            self.fleet,
            self.reload,
            self.trials,
            self._canary_trials,
            emit,
            self.directories.canaries,
        )
        self.events.add_sink(self.canaries.observe)

    def _make_usage(self) -> UsageRecorder:
        usage = UsageRecorder(
            self.records,
            UsageEngines(self.fleet),
            is_on=lambda: self.settings.supervisor.record_usage,
            has_keys=bool(self.desktop_key or self.settings.proxy.api_keys_file),
        )
        self.events.add_sink(usage.observe)
        self.router.signals.slots_taken.connect(usage.slots_taken)
        self.router.signals.slots_freed.connect(usage.slots_freed)
        self.metrics.add(lambda: usage_metrics(usage.since_start))
        return usage

    async def restore_token_limits(self) -> None:
        """Give the token limits of API keys today's recorded usage."""
        if not self.settings.proxy.api_keys_file:
            return
        day = f"{datetime.now().astimezone():%Y-%m-%d}"
        try:
            found = await self.records.usage(Query("key", since=day))
        except HistoryUnavailable as error:
            self.events.emit("usage.record_failed", reason=error.message)
        else:
            tokens = {row["key"]: row["total_tokens"] for row in found}
            self.app.core.admission.tokens.restore(day, tokens)

    def _make_nodes(self) -> Nodes:
        model_loader = ModelLoaderAdapter(self.fleet, self.admission, self.events)
        return Nodes(
            read_nodes(self.settings.nodes, self.events.emit),
            self.router,
            model_loader,
            self.settings.proxy,
            self.events.emit,
        )

    def _make_app(self) -> App:
        settings = self.settings

        def address() -> Address:
            cert = str(self.tls_cert) if self.tls_cert else None
            needs_key = bool(self.desktop_key or self.settings.proxy.api_keys_file)
            return Address(self.server.url, cert, needs_key)

        warmer = PromptWarmerAdapter(self.fleet, self.router, self._prefix_files, self.events.emit)
        storage = JobStorage(self.directories.jobs, settings.jobs)
        control = ModelControlAdapter(self.fleet, self.admission, self.events)
        backend = Backend(
            loader=self.nodes,
            process=self.nodes.process,
            own_key=self.desktop_key.key if self.desktop_key else None,
            warmer=warmer,
            jobs=storage,
            engine=EngineReaderAdapter(self.fleet),
            control=control,
            ollama=OllamaHostAdapter(self.fleet, self.admission, self._model_files(control)),
            dashboard=DashboardHostAdapter(
                self.fleet, self.admission, self.nodes, self.events, self.directories, address
            ),
            history=RecordsAdapter(self.records),
            load_forecaster=LoadForecasterAdapter(self.fleet, self.admission),
            usage=RecordsAdapter(self.records),
            conversations=self.conversations,
        )
        return App(self.router, settings.proxy, self.metrics, backend)

    def _make_hooks(self) -> Hooks:
        router, app, fleet = self.router, self.app, self.fleet

        def busy_models() -> set[str]:
            """Return the models with requests: of batches, and of clients, queued ones included."""
            leased = {instance.upstream.model for instance in router.instances() if instance.leases}
            return leased | {request.model for request in app.requests.stats() if request.model}

        def cause_of(name: str) -> FailureCause | None:
            found = (replica.instance for replica in fleet.all_replicas() if replica.name == name)
            return next((instance.snapshot().cause for instance in found), None)

        return Hooks(
            settings=lambda: self.settings.hooks,
            directory=lambda: hook_directory(self.reload.loaded.path),
            busy_models=busy_models,
            cause_of=cause_of,
            emit=self.events.emit,
        )

    def _model_files(self, control: ModelControlAdapter) -> ModelFilesAdapter:
        return ModelFilesAdapter(
            settings=lambda: self.settings,
            unload=lambda model: self.admission.command("unload", [model]),
            changes=control.changes,
            reload=lambda: self.triggers.start(dry_run=False),
        )

    def _prepare_nodes(self, loaded: Loaded) -> Callable[[], None]:
        nodes = read_nodes(loaded.settings.nodes, self.events.emit)
        # TLS cannot be turned on or off while the proxy listens.
        tls = (loaded.settings.proxy.tls or self._tls) if self._tls else None
        context = tls_context(tls) if tls else None

        def apply() -> None:
            if self.app.tls and tls and context:
                self.app.tls.follow(tls.files, functools.partial(server_context, tls), context)
                self._tls = tls
            self.nodes.set_nodes(nodes)
            self._apply_workers(loaded)

        return apply

    def _apply_workers(self, loaded: Loaded) -> None:
        supervisor = loaded.settings.supervisor
        self.workers.apply(loaded.settings.workers, supervisor.restart, supervisor.drain_timeout_s)

    def _engine(self) -> Engine:
        return self.fleet.planner.engine()
