"""Carries out the daemon's part of commands that arrive at the control socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import cast

from proxy.endpoints.requests import RequestStats
from proxy.errors import NotFound
from proxy.observe.past import HistoryQuery
from proxy.request.models import PrefillResult
from supervisor import __version__
from supervisor.daemon.cache_status import caches_status
from supervisor.daemon.control_messages import (
    BalanceStatus,
    CachesStatus,
    CanariesStatus,
    DaemonStatus,
    EndedCanaryStatus,
    ForgetRequest,
    ForgottenSlots,
    InstanceStatus,
    JoinedHost,
    ModelStatus,
    MovedLayers,
    TrialStatus,
)
from supervisor.daemon.desktop import DesktopHosts
from supervisor.daemon.model_status import (
    balance_status,
    batch_statuses,
    capture_status,
    instance_status,
    model_status,
    moved_layers,
    node_status,
    saved_slot,
    weight_statuses,
    worker_statuses,
)
from supervisor.daemon.parts import DaemonParts
from supervisor.daemon.trial_status import canary_status, trial_status
from supervisor.engine.prompts import WarmPrompt
from supervisor.errors import CorralError, HistoryUnavailable, NoSuchRequest, SettingsInvalid
from supervisor.experiments.canaries import Canary
from supervisor.experiments.capture_lines import CaptureLimits
from supervisor.fleet import cache_commands
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.reload import ReloadResult
from supervisor.loading.decide import UnloadTime, Waiting
from supervisor.settings.load import read_models
from supervisor.slot_store.manifest import Manifest


class DaemonService:
    """The operations of one daemon, as `control_client.Client` documents them.

    Methods that return a task begin an operation. They raise DaemonBusy while the daemon stops; a
    stop cancels the task. `times` returns the seconds since the daemon's start, and whether it is
    stopping. `hosts` is None for a daemon that only ends by command.
    """

    def __init__(
        self,
        parts: DaemonParts,
        times: Callable[[], tuple[float, bool]],
        shutdown: Callable[[str], None],
        hosts: DesktopHosts | None = None,
    ) -> None:
        self.hosts = hosts
        self.shutdown = shutdown
        self._parts = parts
        self._fleet = parts.fleet
        self._times = times

    def command(self, verb: str, models: Sequence[str]) -> Callable[[], bool]:
        """Begin a command on models; return a function that tells whether it is over."""
        return self._parts.admission.command(verb, models)

    def reload(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        """Reload; emits an event at the end unless `dry_run`. DaemonBusy if a reload runs."""
        return self._parts.triggers.start(dry_run=dry_run)

    def add_models(self, tables: Mapping[str, object]) -> asyncio.Task[ReloadResult | CorralError]:
        """Serve further models, by tables `[models.NAME]`; raises SettingsInvalid."""
        return self._parts.triggers.add(read_models(tables))

    def save_slots(self, models: Sequence[str]) -> asyncio.Task[list[Manifest]]:
        """Save idle slots; the result is all saved slots."""
        replicas = [
            self._fleet.replica(instance.name) for instance in self._fleet.instances(models)
        ]
        return self._fleet.spawn(
            cache_commands.save(replicas, self._fleet.planner.launches.slot_persistence)
        )

    def forget_slots(self, asked: ForgetRequest) -> asyncio.Task[ForgottenSlots | CorralError]:
        return self._fleet.spawn(self._forget_slots(asked))

    async def _forget_slots(self, asked: ForgetRequest) -> ForgottenSlots | CorralError:
        conversations = self._parts.conversations
        try:
            if asked["conversation"] is not None:
                found = await conversations.forget_file(asked["conversation"])
            elif asked["request"] is not None:
                number = await self._conversation_number(asked["request"])
                found = await conversations.forget_request(asked["request"], number)
            else:
                found = await conversations.forget_files(asked["model"])
        except CorralError as error:
            return error
        files = [saved_slot(manifest) for manifest in found.files]
        return {"slots": files, "emptied": found.slots, "in_use": found.is_in_use}

    async def _conversation_number(self, request_id: str) -> int | None:
        """Return the conversation number of a request that this daemon answered."""
        with suppress(HistoryUnavailable):
            for request in await self._parts.records.requests(
                HistoryQuery(1, request_id=request_id)
            ):
                return self._parts.conversations.number_of(request)
        return None

    def warm(
        self, model: str, prompt: WarmPrompt
    ) -> asyncio.Task[list[PrefillResult] | CorralError]:
        replicas = [
            self._fleet.replica(instance.name) for instance in self._fleet.instances([model])
        ]
        return self._fleet.spawn(cache_commands.warm(replicas, prompt, self._parts.router))

    async def refresh(self) -> None:
        """Update the figures of `status`, `trials` and `canaries`, in a fraction of a second."""
        await self._parts.stats.refresh(replica.instance for replica in self._fleet.all_replicas())

    def status(self) -> DaemonStatus:
        parts, (up_s, is_stopping) = self._parts, self._times()
        path, waiting = parts.reload.loaded.path, parts.admission.waiting()
        unload = parts.admission.unload_times()
        return {
            "pid": os.getpid(),
            "version": __version__,
            "url": parts.server.url,
            "listen": parts.server.listen,
            "tls_cert": str(parts.tls_cert) if parts.tls_cert else None,
            "keyless": list(parts.keyless),
            "up_s": up_s,
            "stopping": is_stopping,
            "config": str(path) if path else None,
            "models": [
                self._model_status(model, waiting.get(name), unload.get(name))
                for name, model in self._fleet.models.items()
            ],
            "nodes": [node_status(stats) for stats in parts.nodes.stats()],
            "weights": weight_statuses(parts.router.instances()),
            "workers": worker_statuses(parts.settings, parts.known_workers, parts.workers),
            "capture": capture_status(parts.captures.running),
            "batches": batch_statuses(parts.app.batch_queue.stats()),
        }

    async def caches(self) -> CachesStatus:
        persistence = self._fleet.planner.launches.slot_persistence
        saved, budget = await asyncio.to_thread(persistence.store.list_saved), persistence.budget
        limits = self._fleet.slot_files.limits
        return caches_status(self._fleet.models, self._parts.router, saved, budget, limits)

    def requests(self) -> list[RequestStats]:
        return self._parts.app.requests.stats()

    def cancel_request(self, request_id: str) -> None:
        try:
            self._parts.app.requests.cancel(request_id)
        except NotFound as error:
            raise NoSuchRequest(
                error.message, hint="corral requests lists those in flight"
            ) from error

    def dashboard_link(self) -> str:
        sessions = self._parts.app.sessions
        if sessions is None:
            raise SettingsInvalid(
                "the dashboard is off", hint="set dashboard = true under [proxy] and restart"
            )
        return f"{self._parts.server.url}/corral/#token={sessions.new_token()}"

    def capture(
        self, model: str, limits: CaptureLimits
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Capture requests for the block, which reads the lines; DaemonBusy if a capture runs."""
        self._fleet.planner.entry(model)
        return self._parts.captures.begin(model, limits)

    def stop_capture(self) -> None:
        self._parts.captures.stop()

    async def records(self, question: str, asked: object) -> object:
        return await self._parts.records.answer(question, asked)

    def trials(self) -> list[TrialStatus]:
        canaries = {canary.model for canary in self._parts.canaries.running}
        names = [name for name in self._fleet.models if name not in canaries]
        return [found for name in names if (found := self._trial(name))]

    def _trial(self, name: str) -> TrialStatus | None:
        trials, model = self._parts.trials, self._fleet.models.get(name)
        if model is None or (trial := trials.of(name)) is None:
            return None
        return trial_status(model, trial, trials.age_s(trial), self._memory_bytes)

    def canaries(self) -> CanariesStatus:
        canaries, models = self._parts.canaries, self._fleet.models
        running = [
            canary_status(canary, canaries.left_s(canary), models.get(name), self._trial(name))
            for canary in canaries.running
            for name in [canary.model]
        ]
        return {"running": running, "ended": cast("list[EndedCanaryStatus]", list(canaries.ended))}

    def start_canary(self, canary: Canary) -> asyncio.Task[CorralError | None]:
        return self._fleet.spawn(self._parts.canaries.start(canary))

    def end_canary(self, model: str, *, is_promoted: bool) -> asyncio.Task[CorralError | None]:
        canaries = self._parts.canaries
        return self._fleet.spawn((canaries.promote if is_promoted else canaries.withdraw)(model))

    def balances(self) -> list[BalanceStatus]:
        now_s = asyncio.get_running_loop().time()
        return [
            balance_status(replica.place.model, replica.name, run, now_s)
            for replica, run in self._parts.layer_mover.runs()
        ]

    def balance(self, model: str, *, undo: bool) -> asyncio.Task[MovedLayers | CorralError]:
        mover = self._parts.layer_mover

        async def move() -> MovedLayers | CorralError:
            moved = await (mover.undo(model) if undo else mover.move(model))
            return moved if isinstance(moved, CorralError) else moved_layers(moved)

        return self._fleet.spawn(move())

    def _memory_bytes(self, replica: Replica) -> int | None:
        facts = replica.instance.snapshot()
        return self._parts.stats.stats_of(facts).memory_bytes if facts.pid else None

    def _model_status(
        self, model: Model, waiting: Waiting | None, unload: UnloadTime | None
    ) -> ModelStatus:
        instances = [self._instance_status(replica) for replica in model.all_replicas]
        return model_status(model, instances, waiting, unload)

    def _instance_status(self, replica: Replica) -> InstanceStatus:
        facts, is_retiring = replica.instance.snapshot(), self._fleet.is_retiring(replica)
        busy = self._parts.router.count_in_flight(facts.name)
        stats = self._parts.stats.stats_of(facts)
        return instance_status(facts, replica.plan, stats, busy, is_retiring=is_retiring)

    def joined_host(self, host: int) -> JoinedHost:
        key = self._parts.desktop_key
        return {
            "host": host,
            "api_key_file": str(key.path) if key else "",
            "status": self.status(),
        }
