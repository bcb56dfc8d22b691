"""The parts of a daemon, and what connects them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from proxy.app import App, build_app
from proxy.auth.token_limits import TokenLimits
from proxy.jobs.jobs import JobStorage
from proxy.metrics.prometheus import Metrics
from proxy.nodes.nodes import Nodes
from proxy.router.router import Router
from proxy.server import Server
from proxy.tls.contexts import server_context
from supervisor.adaptive.apply import ChangeApplier
from supervisor.adaptive.controller import AdaptiveController
from supervisor.adaptive.engine_processes import engine_processes, measured_speeds
from supervisor.adaptive.layer_mover import LayerMover
from supervisor.adaptive.slots import SlotDecider
from supervisor.adaptive.thread_decider import ThreadDecider
from supervisor.adaptive.values import AdaptedValues
from supervisor.admission.controller import AdmissionController
from supervisor.admission.memory_usage import MemoryUsage
from supervisor.canary.canaries import Canaries, CanaryParts
from supervisor.canary.history import CanaryHistory
from supervisor.canary.overlay import CanaryTrials
from supervisor.canary.record import CanaryRecord
from supervisor.capture.captures import Captures
from supervisor.desktop.api_key import DesktopKey
from supervisor.engines.discover import Engine
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reductions import Reductions
from supervisor.fleet.stats import StatsReader
from supervisor.history.database import HistoryDatabase
from supervisor.history.history import History
from supervisor.hooks.command import hook_directory
from supervisor.hooks.hooks import Hooks, HookSources
from supervisor.host.paths import Directories
from supervisor.process.exit_cause import FailureCause
from supervisor.process.private_runtime import is_in_use
from supervisor.proxy_adapter.conversation_forgetter import ConversationForgetter
from supervisor.proxy_adapter.dashboard_host import Address, DashboardHostAdapter
from supervisor.proxy_adapter.engine_reader import EngineReaderAdapter
from supervisor.proxy_adapter.load_forecaster import LoadForecasterAdapter
from supervisor.proxy_adapter.model_control import ModelControlAdapter
from supervisor.proxy_adapter.model_files import ModelFilesAdapter
from supervisor.proxy_adapter.model_loader import ModelLoaderAdapter
from supervisor.proxy_adapter.ollama_host import OllamaHostAdapter
from supervisor.proxy_adapter.prefix_files import PrefixFiles
from supervisor.proxy_adapter.prompt_warmer import PromptWarmerAdapter
from supervisor.proxy_adapter.request_history import RequestHistoryAdapter
from supervisor.proxy_adapter.router_events import RouterEvents
from supervisor.proxy_adapter.settings import checked, keyless_addresses, read_nodes, tls_context
from supervisor.proxy_adapter.shard_metrics import shard_metrics
from supervisor.proxy_adapter.slot_file_metrics import slot_file_metrics
from supervisor.proxy_adapter.slot_file_storage import SlotFileStorageAdapter
from supervisor.proxy_adapter.usage_engines import UsageEngines
from supervisor.proxy_adapter.usage_reader import UsageReaderAdapter, usage_metrics
from supervisor.reload.reload import Reload
from supervisor.reload.replace import Replacer
from supervisor.reload.triggers import ReloadTriggers
from supervisor.request_record.files import RecordFiles
from supervisor.request_record.recorder import RequestRecorder
from supervisor.service.environment import ServiceEnvironment
from supervisor.settings.load import Loaded
from supervisor.settings.schema import Settings
from supervisor.shards.layer_shares import LayerShares
from supervisor.trial.storage import TrialStore
from supervisor.trial.trials import Trials
from supervisor.usage.files import read_all
from supervisor.usage.journal import Journal
from supervisor.usage.query import tokens_by_key
from supervisor.usage.recorder import UsageRecorder
from supervisor.workers.address import free_port
from supervisor.workers.known import KnownWorkers
from supervisor.workers.pool import WorkerPool


class DaemonParts:
    """All parts of one daemon; constructs them on a running loop, and runs none.

    `reread` reads the sources of the settings again, in a thread; it raises CorralError.
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
        proxy = checked(loaded.settings.proxy)
        self._tls = proxy.tls
        self.metrics = Metrics(proxy, events.emit)
        router_events = RouterEvents()
        storage = SlotFileStorageAdapter()
        self.router = Router(proxy, router_events, self.metrics.emit, storage)
        self.stats = StatsReader(functools.partial(self.metrics.engine_values, self.router))
        self._adapted = AdaptedValues()
        self._canary_trials = CanaryTrials()
        self._reductions = Reductions()
        self.known_workers = KnownWorkers(free_port)
        self.fleet = Fleet(
            self._planner(loaded),
            self.router,
            events.emit,
            on_change=lambda: self.admission.wake(),  # noqa: PLW0108 (made below)
        )
        storage.connect(self.fleet)
        self._prefix_files = PrefixFiles(self.fleet, self.router, storage, events.emit)
        self.conversations = ConversationForgetter(self.fleet, self.router, storage)
        memory_usage, replacer = MemoryUsage(self.fleet), Replacer(self.fleet)
        self.admission = AdmissionController(self.fleet, self.router, events.emit, memory_usage)
        self.adaptive = self._make_adaptive(replacer, memory_usage)
        self.layer_mover = self._make_layer_mover(replacer)
        self.reload = self._make_reload(loaded, reread, replacer)
        self.triggers = ReloadTriggers(self.reload, self.notifier.reloading)
        self.workers = WorkerPool(
            self.known_workers, self._engine, directories, events.emit, self.fleet.worker_ended
        )
        self._apply_workers(loaded)
        events.add_sink(self._prefix_files.observe)
        self.recorder = RequestRecorder(
            RecordFiles(directories.request_record), events, self._is_recorded
        )
        self.history = History(
            HistoryDatabase(directories.history), events.emit, lambda: self.settings.history
        )
        events.add_sink(self.history.observe)
        self.trials = Trials(self.fleet, self.router.in_flight, TrialStore(directories.trials))
        events.add_sink(self.trials.observe)
        self.canaries = self._make_canaries()
        events.add_sink(self.canaries.observe)
        events.add_sink(self.notifier.observe)
        self.nodes = self._make_nodes()
        self.usage = self._make_usage()
        self.app = self._make_app()
        limits = self._token_limits() if self.settings.proxy.api_keys_file else None
        router_events.connect(self.fleet, self.admission, self.nodes, self.usage, limits)
        self.captures = Captures(self.app.capture, lambda: self.fleet.planner, events.emit)
        self.server = Server(self.app, self.settings.proxy, environment.sockets)
        self.keyless = () if self.desktop_key else keyless_addresses(self.settings.proxy)
        self.hooks = self._make_hooks()
        events.add_sink(self.hooks.observe)

    @property
    def tls_cert(self) -> Path | None:
        """The file of the certificate that the proxy shows."""
        return self._tls.cert if self._tls else None

    @property
    def settings(self) -> Settings:
        """Those that apply now."""
        return self.reload.loaded.settings

    def _planner(self, loaded: Loaded) -> LaunchPlanner:
        return LaunchPlanner(
            self._canary_trials.laid_on(loaded.settings),
            self.directories,
            self._adapted.of,
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

    def _make_canaries(self) -> Canaries:
        emit = self.events.emit
        self.canary_history = CanaryHistory(CanaryRecord(self.directories.canaries), emit)
        return Canaries(
            CanaryParts(
                self.fleet,
                self.reload,
                self.trials,
                self._canary_trials,
                self.canary_history,
                emit,
            )
        )

    def _make_usage(self) -> UsageRecorder:
        usage = UsageRecorder(
            Journal(self.directories.usage),
            UsageEngines(self.fleet),
            self.events.emit,
            is_on=lambda: self.settings.supervisor.record_usage,
            has_keys=bool(self.desktop_key or self.settings.proxy.api_keys_file),
        )
        self.events.add_sink(usage.observe)
        self.metrics.add(lambda: usage_metrics(usage.since_start))
        return usage

    def _token_limits(self) -> TokenLimits | None:
        """Return the limits of API keys, which know what was used today."""
        if (limits := self.app.token_limits) is None:
            return None
        day = f"{datetime.now().astimezone():%Y-%m-%d}"
        try:
            limits.restore(day, tokens_by_key(read_all(self.directories.usage), day))
        except OSError as error:
            self.events.emit("usage.record_failed", reason=str(error))
        return limits

    def _make_nodes(self) -> Nodes:
        model_loader = ModelLoaderAdapter(self.fleet, self.admission, self.events)
        return Nodes(
            read_nodes(self.settings.nodes, self.events.emit),
            self.router,
            model_loader,
            self.settings.proxy,
            self.events.emit,
            model_loader.created,
        )

    def _make_app(self) -> App:
        settings = self.settings
        warmer = PromptWarmerAdapter(self.fleet, self.router, self._prefix_files, self.events.emit)
        storage = JobStorage(self.directories.jobs, settings.jobs)
        control = ModelControlAdapter(self.fleet, self.admission, self.events)
        return build_app(
            self.router,
            self.nodes,
            settings.proxy,
            self.metrics,
            warmer,
            storage,
            EngineReaderAdapter(self.fleet),
            control,
            self.desktop_key.key if self.desktop_key else None,
            OllamaHostAdapter(self.fleet, self.admission, self._model_files(control)),
            self.nodes.process,
            DashboardHostAdapter(
                self.fleet,
                self.admission,
                self.nodes,
                self.events,
                self.directories,
                self._address,
            ),
            RequestHistoryAdapter(self.history),
            LoadForecasterAdapter(self.fleet, self.admission),
            UsageReaderAdapter(self.directories.usage),
            self.conversations,
        )

    def _address(self) -> Address:
        cert = self.tls_cert
        needs_key = bool(self.desktop_key or self.settings.proxy.api_keys_file)
        return Address(self.server.url, str(cert) if cert else None, needs_key)

    def _make_hooks(self) -> Hooks:
        sources = HookSources(
            settings=lambda: self.settings.hooks,
            directory=lambda: hook_directory(self.reload.loaded.path),
            busy_models=self._busy_models,
            cause_of=self._failure_of,
        )
        return Hooks(sources, self.events.emit)

    def _busy_models(self) -> set[str]:
        """The models with requests in flight: those of clients, also queued, and of batches."""
        leased = {one.upstream.model for one in self.router.instances() if one.leases}
        return leased | {one.model for one in self.app.requests.stats() if one.model}

    def _failure_of(self, instance: str) -> FailureCause | None:
        found = (one.instance for one in self.fleet.all_replicas() if one.name == instance)
        return next((one.snapshot().cause for one in found), None)

    def _model_files(self, control: ModelControlAdapter) -> ModelFilesAdapter:
        return ModelFilesAdapter(
            settings=lambda: self.settings,
            unload=lambda model: self.admission.command("unload", [model]),
            changes=control.changes,
            reload=lambda: self.triggers.start(dry_run=False),
        )

    def _prepare_nodes(self, loaded: Loaded) -> Callable[[], None]:
        nodes = read_nodes(loaded.settings.nodes, self.events.emit)
        # TLS cannot begin or end while the address is listened on.
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

    def _is_recorded(self, model: str) -> bool:
        return self.settings.supervisor.record_requests and model in self.settings.models
