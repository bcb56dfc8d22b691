"""Constructs the parts of a daemon, each after the parts that it needs.

1. The router, and the fleet, which runs engines for it.
2. Parts that add models: admission (it loads them), workers, other nodes; and reloads of the
   settings.
3. Parts that observe and adjust: adapted values, layers, prefix files, records, trials, canaries.
4. The proxy, to which the backend gives these; and the parts that need the proxy: captures, hooks.

To add a part, write a subclass of `supervisor.events.Part`, and list it in `DaemonParts.parts`.
"""

from __future__ import annotations

import asyncio
import functools

from proxy.app import App, Backend
from proxy.endpoints.prometheus import Metrics
from proxy.nodes.nodes import Nodes
from proxy.router.router import Router
from proxy.server import Server
from supervisor.autoscale.apply import AdaptiveController
from supervisor.autoscale.drafts import DraftDecider
from supervisor.autoscale.layer_mover import LayerMover
from supervisor.autoscale.slots import SlotDecider
from supervisor.autoscale.threads import ThreadDecider
from supervisor.backend import proxy_settings
from supervisor.backend.bench import BenchAdapter
from supervisor.backend.dashboard import DashboardHostAdapter
from supervisor.backend.hub import HubAdapter
from supervisor.backend.machine_models import MachineModelsAdapter
from supervisor.backend.models import LocalModels
from supervisor.backend.ollama import OllamaHostAdapter
from supervisor.backend.settings_file import SettingsFileAdapter
from supervisor.backend.slot_exchange import SlotExchange
from supervisor.backend.slot_storage import ConversationForgetter, PromptWarmerAdapter
from supervisor.backend.usage import RecordsAdapter, UsageEngines, UsageRecorder
from supervisor.daemon.cache_status import caches_status
from supervisor.daemon.control_messages import CachesStatus
from supervisor.daemon.desktop import DesktopKey
from supervisor.events import EventStream, Part
from supervisor.experiments.canaries import Canaries, with_canaries
from supervisor.experiments.capture import Captures
from supervisor.experiments.trials import Trials
from supervisor.fleet.devices import DeviceMonitor
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.planner import LaunchPlanner, Reductions
from supervisor.fleet.reload import Reload, Reread
from supervisor.fleet.replace import Replacer
from supervisor.fleet.stats import StatsReader
from supervisor.loading.controller import AdmissionController
from supervisor.loading.device_yield import DeviceYield
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.plan.plan import CanaryTrial
from supervisor.plan.setting import SettingsByFlag
from supervisor.records.store import RecordStore
from supervisor.records.writer import Records
from supervisor.rpc.address import KnownWorkers, free_port
from supervisor.rpc.pool import WorkerPool
from supervisor.rpc.shards import LayerShares
from supervisor.service.hooks import Hooks
from supervisor.service.notifier import ServiceNotifier
from supervisor.settings.load import Loaded
from supervisor.settings.schema import Settings
from supervisor.system.machine import is_on_battery
from supervisor.system.paths import Directories


class DaemonParts:
    """All parts of one daemon. Constructed on a running loop; `Daemon` runs them.

    `reread` reads the settings from their sources again, in a thread, with a content in place of
    the file's if it is given one; it raises CorralError.
    """

    def __init__(
        self,
        loaded: Loaded,
        reread: Reread,
        directories: Directories,
        events: EventStream,
        notifier: ServiceNotifier,
        desktop_key: DesktopKey | None = None,
    ) -> None:
        self.directories = directories
        self.desktop_key = desktop_key
        self.events = events
        self.notifier = notifier
        proxy, emit = proxy_settings.check_proxy_settings(loaded.settings.proxy), events.emit
        self.metrics = Metrics(proxy, events.report)
        self.router = Router(proxy, self.metrics.emit, is_on_battery=is_on_battery)
        self.stats = StatsReader(functools.partial(self.metrics.engine_values, self.router))
        self._adapted: dict[str, SettingsByFlag] = {}
        self._canary_trials: dict[str, CanaryTrial] = {}
        self._reductions = Reductions()
        self.known_workers = KnownWorkers(free_port)
        self.fleet = Fleet(self._planner(loaded), self.router, emit)
        self.devices = DeviceMonitor()
        self._memory_usage, replacer = MemoryUsage(self.fleet), Replacer(self.fleet)
        self.admission = AdmissionController(self.fleet, self.router, emit, self._memory_usage)
        self.device_yield = DeviceYield(
            self.fleet, self.admission, self._memory_usage, self.devices, emit
        )
        self._add_models(loaded, reread, replacer)
        threads = ThreadDecider.of_fleet(self.fleet, directories)
        in_flight = self.router.count_in_flight
        self.drafts = DraftDecider.of_fleet(self.fleet, in_flight, directories.draft_speeds, emit)
        self.adaptive = AdaptiveController(
            self.fleet,
            self.router,
            replacer,
            self._memory_usage,
            adapted=self._adapted,
            emit=emit,
            deciders=[SlotDecider(), threads, self.drafts],
            is_memory_wanted=lambda: bool(self.admission.waiting()),
        )
        shares, now_s = LayerShares(directories.layer_shares), asyncio.get_running_loop().time
        self.layer_mover = LayerMover(self.fleet, replacer, shares, emit, now_s)
        self._warmer = PromptWarmerAdapter(self.fleet, self.router, emit)
        self.conversations = ConversationForgetter(self.fleet, self.router)
        self.slot_exchange = SlotExchange(
            self.fleet.slot_files,
            self.nodes.slot_files,
            self.router,
            lambda: self.fleet.planner.launches.slot_persistence.store,
            lambda: self.settings.supervisor,
            emit,
        )
        self.router.node_files.connect(self.slot_exchange)
        self.trials = Trials(self.fleet, self.router.count_in_flight, directories.trials)
        self.canaries = Canaries(
            self.fleet, self.reload, self.trials, self._canary_trials, emit, directories.canaries
        )
        self.records = Records(
            RecordStore(directories.data),
            emit,
            lambda: self.settings.history.limits,
            lambda model: self.settings.is_recorded(model),  # noqa: PLW0108 (a reload replaces them)
        )
        self.usage = self._make_usage()
        self.app = App(self.router, proxy, self.metrics, self._make_backend())
        self.server = Server(self.app, notifier.sockets)
        self.keyless = () if desktop_key else proxy_settings.keyless_addresses(proxy)
        self.is_reachable = bool(proxy_settings.outside_addresses(proxy))
        self.captures = Captures(self.app.capture, self.fleet, emit)
        self.hooks = Hooks(self.reload, self.fleet, self.app.requests.models, emit)
        self.metrics.add(self.nodes.metrics)
        for part in self.parts:
            events.add_sink(part.observe)
            self.metrics.add(part.metrics)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those that observe events, serve or report metrics; a shutdown cancels them in order."""
        return (
            self.canaries,
            self.layer_mover,
            self.adaptive,
            self.drafts,
            self.admission,
            self.hooks,
            self.records,
            self.usage,
            self.trials,
            self.workers,
            self.notifier,
            self.captures,
            self._models,
            self._warmer,
            self.fleet.slot_files,
            self.devices,
            self.device_yield,
        )

    @property
    def settings(self) -> Settings:
        """The current settings; a reload replaces them."""
        return self.reload.settings

    def _planner(self, loaded: Loaded) -> LaunchPlanner:
        return LaunchPlanner(
            with_canaries(loaded.settings, self._canary_trials),
            self.directories,
            self._adapted,
            known_workers=self.known_workers,
            reductions=self._reductions,
        )

    def _add_models(self, loaded: Loaded, reread: Reread, replacer: Replacer) -> None:
        """Make the workers and nodes, and the parts that reload settings."""
        fleet, emit = self.fleet, self.events.emit
        self.workers = WorkerPool(
            self.known_workers,
            lambda: fleet.planner.engine(),  # noqa: PLW0108 (a reload replaces the planner)
            self.directories,
            emit,
            fleet.worker_ended,
        )
        self.workers.prepare(loaded)()
        self._models = LocalModels(fleet, self.admission, self.events)
        settings = loaded.settings
        nodes = proxy_settings.read_nodes(settings.nodes, emit)
        self.nodes = Nodes(nodes, self.router, self._models, settings.proxy, emit)
        self.certificate = proxy_settings.Certificate(settings.proxy.tls, emit)
        self.reload = Reload(
            fleet,
            loaded,
            read=reread,
            make_planner=self._planner,
            prepares=[
                self.certificate.prepare,
                functools.partial(proxy_settings.prepare_nodes, self.nodes, emit),
                self.workers.prepare,
            ],
            emit=emit,
            replacer=replacer,
            applying=self.notifier.reloading,
        )

    def _make_usage(self) -> UsageRecorder:
        usage = UsageRecorder(
            self.records,
            UsageEngines(self.fleet),
            is_on=lambda: self.settings.supervisor.record_usage,
            has_keys=bool(self.desktop_key or self.settings.proxy.api_keys_file),
        )
        self.router.signals.slots_taken.connect(usage.slots_taken)
        self.router.signals.answered.connect(usage.answered)
        self.router.signals.slots_freed.connect(usage.slots_freed)
        return usage

    async def read_caches(self) -> CachesStatus:
        persistence = self.fleet.planner.launches.slot_persistence
        saved = await asyncio.to_thread(persistence.store.list_saved)
        budget = persistence.budget(sum(manifest.size_bytes for manifest in saved))
        limits = self.fleet.slot_files.limits
        return caches_status(self.fleet.models, self.router, saved, budget, limits)

    def _make_backend(self) -> Backend:
        fleet, admission, models = self.fleet, self.admission, self._models
        records = RecordsAdapter(self.records)
        reload = functools.partial(self.reload.start, dry_run=False)
        on_machine = MachineModelsAdapter(self.reload, self._planner, admission, self.directories)
        return Backend(
            loader=self.nodes,
            process=self.nodes.process,
            tls=self.certificate.context,
            own_key=self.desktop_key.key if self.desktop_key else None,
            warmer=self._warmer,
            jobs=(self.directories.jobs, self.settings.jobs),
            engine=models,
            control=models,
            ollama=OllamaHostAdapter(fleet, admission, models.changes, reload),
            dashboard=DashboardHostAdapter(
                on_machine,
                BenchAdapter(fleet, on_machine, lambda: self.reload.loaded, self.directories),
                SettingsFileAdapter(self.reload, self._planner),
                HubAdapter(fleet, self.directories.models),
                fleet,
                admission,
                self.nodes,
                self.events,
                self.directories,
                self.certificate,
                self._memory_usage,
                self.devices,
                self.conversations,
                self.read_caches,
            ),
            history=records,
            load_forecaster=models,
            usage=records,
            slot_files=self.slot_exchange,
            conversations=self.conversations,
        )
