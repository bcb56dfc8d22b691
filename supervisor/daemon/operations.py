"""Carries out the daemon's part of commands that arrive at the control socket."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Annotated, Any, Final, Literal

from attrs import define, field
from pydantic import Field, TypeAdapter, ValidationError

from proxy.errors import NotFound
from proxy.nodes.gather import NodeAnswer, Question
from proxy.observe.past import HistoryQuery, RequestStats
from supervisor import __version__
from supervisor.builds.installed import engine_setting
from supervisor.daemon import control_messages as messages
from supervisor.daemon import model_status
from supervisor.daemon.desktop import DesktopHosts, backend_hosts
from supervisor.daemon.parts import DaemonParts
from supervisor.daemon.trial_status import canary_status, trial_status
from supervisor.engine import prompts
from supervisor.engine.prompts import WarmPrompt
from supervisor.errors import CorralError, HistoryUnavailable, NoSuchRequest, SettingsInvalid
from supervisor.experiments import capture_lines
from supervisor.experiments.canaries import Canary
from supervisor.fleet import cache_commands
from supervisor.fleet.launches import with_scales
from supervisor.fleet.model import Replica
from supervisor.fleet.reload import ReloadResult
from supervisor.records.store import QUESTIONS
from supervisor.settings.load import read_changes, read_models

LIMIT_MAX_S: Final = 31 * 86_400
MARGIN_MAX: Final = 1.0


@define(eq=False, slots=False)
class DaemonService:
    """The operations of one daemon, as `control_client.Client` documents them.

    Methods that return a task begin an operation. They raise DaemonBusy while the daemon stops; a
    stop cancels the task. Methods that return a function tell by it whether a command is over.
    `times` returns the seconds since the daemon's start, and whether it is stopping. `hosts` is
    None for a daemon that only ends by command.
    """

    _parts: DaemonParts
    _times: Callable[[], tuple[float, bool]]
    _shut_down: Callable[[str], None] = field(alias="shutdown")
    _hosts: DesktopHosts | None = None

    def __attrs_post_init__(self) -> None:
        self._fleet = self._parts.fleet

    def command(self, verb: str, models: list[str]) -> Callable[[], bool]:
        return self._parts.admission.command(verb, models)

    def yield_devices(
        self, duration_s: Annotated[float, Field(gt=0, le=LIMIT_MAX_S)] | None, *, end: bool
    ) -> Callable[[], bool]:
        device_yield = self._parts.device_yield
        return device_yield.end() if end else device_yield.begin(duration_s or math.inf)

    def reload(self, *, dry_run: bool) -> asyncio.Task[messages.ReloadReport | CorralError]:
        """Reload; emits an event at the end unless `dry_run`. DaemonBusy if a reload runs."""
        return self._fleet.spawn(_reload_report(self._parts.reload.start(dry_run=dry_run)))

    def add_models(
        self, models: dict[str, Any]
    ) -> asyncio.Task[messages.ReloadReport | CorralError]:
        return self._fleet.spawn(_reload_report(self._parts.reload.add(read_models(models))))

    def change_models(
        self, models: list[str], settings: dict[str, Any]
    ) -> asyncio.Task[messages.ReloadReport | CorralError]:
        changes = read_changes(dict.fromkeys(models, settings))
        return self._fleet.spawn(_reload_report(self._parts.reload.change(changes)))

    def save_slots(self, models: list[str]) -> asyncio.Task[list[messages.SavedSlot] | CorralError]:
        replicas = self._fleet.selected_replicas(models)

        async def save() -> list[messages.SavedSlot] | CorralError:
            persistence = self._fleet.planner.launches.slot_persistence
            saved = await cache_commands.save(replicas, persistence)
            if isinstance(saved, CorralError):
                return saved
            return [*map(model_status.saved_slot, saved)]

        return self._fleet.spawn(save())

    def forget_slots(
        self, model: str | None, conversation: str | None, request: str | None
    ) -> asyncio.Task[messages.ForgottenSlots | CorralError]:
        if sum(name is not None for name in (model, conversation, request)) > 1:
            raise SettingsInvalid("name a model, a conversation or a request, or none")
        return self._fleet.spawn(self._forget_slots(model, conversation, request))

    async def _forget_slots(
        self, model: str | None, conversation: str | None, request: str | None
    ) -> messages.ForgottenSlots | CorralError:
        conversations = self._parts.conversations
        try:
            if conversation is not None:
                forgotten = await conversations.forget_file(conversation)
            elif request is not None:
                number = await self._conversation_number(request)
                forgotten = await conversations.forget_request(request, number)
            else:
                forgotten = await conversations.forget_files(model)
        except CorralError as error:
            return error
        manifests, emptied, is_in_use = forgotten
        files = [model_status.saved_slot(manifest) for manifest in manifests]
        return messages.ForgottenSlots(slots=files, emptied=emptied, in_use=is_in_use)

    async def _conversation_number(self, request_id: str) -> int | None:
        """Return the conversation number of a request that this daemon answered."""
        with suppress(HistoryUnavailable):
            for request in await self._parts.records.requests(
                HistoryQuery(1, request_id=request_id)
            ):
                return self._parts.conversations.number_of(request)
        return None

    def warm(
        self, model: str, body: dict[str, Any]
    ) -> asyncio.Task[list[messages.WarmedInstance] | CorralError]:
        prompt = warm_prompt(model, body)
        if found := self._fleet.models.get(model):
            prompt = with_scales(prompt, found.entry.loras)
        replicas = self._fleet.selected_replicas([model])

        async def warm() -> list[messages.WarmedInstance] | CorralError:
            results = await cache_commands.warm(replicas, prompt, self._parts.router)
            if isinstance(results, CorralError):
                return results
            return [
                messages.WarmedInstance.of(found, cached=found.cached_tokens) for found in results
            ]

        return self._fleet.spawn(warm())

    async def refresh(self) -> None:
        """Update the figures of `status`, `trials` and `canaries`, in a fraction of a second."""
        await self._parts.stats.refresh(replica.instance for replica in self._fleet.all_replicas())
        await self._parts.devices.refresh()

    async def status(self) -> messages.DaemonStatus:
        await self.refresh()
        return self.current_status()

    def current_status(self) -> messages.DaemonStatus:
        """Return the status with the figures of the last refresh."""
        parts, (up_s, is_stopping) = self._parts, self._times()
        path, waiting = parts.reload.loaded.path, parts.admission.waiting()
        loaded = parts.admission.loaded_states()
        return messages.DaemonStatus(
            pid=os.getpid(),
            version=__version__,
            url=parts.server.url,
            listen=parts.server.listen,
            tls_cert=parts.certificate.path,
            keyless=list(parts.keyless),
            up_s=up_s,
            stopping=is_stopping,
            config=str(path) if path else None,
            models=[
                model_status.model_status(
                    model,
                    [self._instance_status(replica) for replica in model.all_replicas],
                    waiting.get(name),
                    loaded.get(name),
                    changed=parts.reload.changes(name),
                    drafts=parts.drafts.adapted(name, model.plan),
                    is_reachable=parts.is_reachable,
                )
                for name, model in self._fleet.models.items()
            ],
            groups=parts.reload.settings.group_rules.rules(),
            nodes=[
                messages.NodeStatus.of(node, reason=node.problem) for node in parts.nodes.stats()
            ],
            weights=model_status.weight_statuses(parts.router.instances()),
            workers=model_status.worker_statuses(
                parts.settings, parts.known_workers, parts.workers
            ),
            capture=model_status.capture_status(parts.captures.running),
            batches=model_status.batch_statuses(parts.app.batch_queue.stats()),
            yielded=messages.YieldStatus(
                None if math.isinf(left_s) else left_s,
                parts.device_yield.models,
                parts.device_yield.is_quiet_hours,
            )
            if (left_s := parts.device_yield.left_s) is not None
            else None,
            gave_way=parts.device_yield.gave_way,
            devices=[
                messages.DeviceStatus.of(card, throttled=card.throttled and [*card.throttled])
                for card in parts.devices.latest
            ],
        )

    async def caches(self) -> messages.CachesStatus:
        return await self._parts.read_caches()

    def machine(self) -> dict[str, Any]:
        machines = self._parts.app.machines
        return machines.machine() if machines else {}

    async def ask_nodes(self, question: Question, query: dict[str, str]) -> list[NodeAnswer]:
        return await self._parts.nodes.ask(question, query)

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
        self,
        model: str,
        duration_s: Annotated[float, Field(gt=0, le=capture_lines.DURATION_MAX_S)],
        size_bytes: Annotated[
            int, Field(ge=capture_lines.SIZE_MIN_BYTES, le=capture_lines.SIZE_MAX_BYTES)
        ],
        requests: Annotated[int, Field(ge=1)] | None,
    ) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """Capture requests for the block, which reads the lines; DaemonBusy if a capture runs."""
        self._fleet.planner.entry(model)
        return self._parts.captures.begin(
            model, capture_lines.CaptureLimits(duration_s, size_bytes, requests)
        )

    def stop_capture(self) -> None:
        self._parts.captures.stop()

    async def records(self, question: str, asked: Any) -> Any:
        try:
            found = TypeAdapter(QUESTIONS[question][0]).validate_python(asked)
        except (KeyError, ValidationError) as error:
            raise SettingsInvalid("the body must be a question about records") from error
        return await self._parts.records.answer(question, found)

    async def trials(self) -> list[messages.TrialStatus]:
        await self.refresh()
        canaries = {canary.model for canary in self._parts.canaries.running}
        names = [name for name in self._fleet.models if name not in canaries]
        return [found for name in names if (found := self._trial(name))]

    def _trial(self, name: str) -> messages.TrialStatus | None:
        trials, model = self._parts.trials, self._fleet.models.get(name)
        if model is None or (trial := trials.of(name)) is None:
            return None
        return trial_status(model, trial, trials.age_s(trial), self._memory_bytes)

    async def canaries(self) -> messages.CanariesStatus:
        await self.refresh()
        return self._canaries()

    def _canaries(self) -> messages.CanariesStatus:
        canaries, models = self._parts.canaries, self._fleet.models
        running = [
            canary_status(canary, canaries.left_s(canary), models.get(name), self._trial(name))
            for canary in canaries.running
            for name in [canary.model]
        ]
        return messages.CanariesStatus(running, [*map(dict, canaries.ended)])

    def start_canary(
        self,
        model: str,
        engine: Annotated[str, Field(min_length=1)],
        share: Annotated[float, Field(gt=0, lt=1)],
        limit_s: Annotated[float, Field(gt=0, le=LIMIT_MAX_S)] | None,
        margin: Annotated[float, Field(ge=0, le=MARGIN_MAX)],
    ) -> asyncio.Task[messages.CanariesStatus | CorralError]:
        canary = Canary(model, engine_setting(engine), share, limit_s, margin)
        return self._fleet.spawn(self._after(lambda: self._parts.canaries.start(canary)))

    def end_canary(
        self, model: str, verb: Literal["promote", "withdraw"]
    ) -> asyncio.Task[messages.CanariesStatus | CorralError]:
        return self._fleet.spawn(self._after(lambda: self._parts.canaries.end(model, verb)))

    async def _after(
        self, change: Callable[[], Awaitable[CorralError | None]]
    ) -> messages.CanariesStatus | CorralError:
        return await change() or self._canaries()

    def balances(self) -> list[messages.BalanceStatus]:
        now_s = asyncio.get_running_loop().time()
        return [
            model_status.balance_status(replica.place.model, replica.name, run, now_s)
            for replica, run in self._parts.layer_mover.runs()
        ]

    def balance(
        self, model: str, *, undo: bool
    ) -> asyncio.Task[messages.MovedLayers | CorralError]:
        mover = self._parts.layer_mover

        async def move() -> messages.MovedLayers | CorralError:
            moved = await (mover.undo(model) if undo else mover.move(model))
            return moved if isinstance(moved, CorralError) else model_status.moved_layers(moved)

        return self._fleet.spawn(move())

    def _memory_bytes(self, replica: Replica) -> int | None:
        facts = replica.instance.snapshot()
        return self._parts.stats.stats_of(facts).memory_bytes if facts.pid else None

    def _instance_status(self, replica: Replica) -> messages.InstanceStatus:
        facts, is_retiring = replica.instance.snapshot(), self._fleet.is_retiring(replica)
        busy = self._parts.router.count_in_flight(facts.name)
        return model_status.instance_status(
            facts, replica.plan, self._parts.stats.stats_of(facts), busy, is_retiring=is_retiring
        )

    @contextmanager
    def host(self) -> Iterator[tuple[messages.JoinedHost, Callable[[], bool]]]:
        hosts, key = backend_hosts(self._hosts), self._parts.desktop_key
        with hosts.join() as host:
            joined = messages.JoinedHost(host, str(key.path) if key else "", self.current_status())
            # The last host stays until the daemon ends.
            yield joined, lambda: not (hosts.has(host) or hosts.is_empty)

    def leave(self, host: str) -> None:
        backend_hosts(self._hosts).leave(int(host))

    def keep(self) -> None:
        backend_hosts(self._hosts).keep()

    def events(self) -> Callable[[], bool]:
        return lambda: False

    def shutdown(self) -> Callable[[], bool]:
        self._shut_down("requested over the control socket")
        return lambda: False


async def _reload_report(
    reload: asyncio.Task[ReloadResult | CorralError],
) -> messages.ReloadReport | CorralError:
    result = await reload
    return result if isinstance(result, CorralError) else model_status.reload_report(result)


def warm_prompt(model: str, body: dict[str, Any]) -> WarmPrompt:
    """Return a chat request, or a system prompt `{"prompt": text}`; raises SettingsInvalid."""
    name, text = f"for {model}", body.get("prompt")
    return prompts.of_text(name, text) if isinstance(text, str) else prompts.of_request(name, body)
