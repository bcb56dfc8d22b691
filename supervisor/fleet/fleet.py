"""All instances, by model.

The fleet applies commands for models to their instances and reports when these are done. `reload`
and `replace` add and retire instances while it serves.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.common.background_tasks import FAILURES, persist
from proxy.upstream.upstream import Timings, Upstream
from supervisor.engine.calibration import ThreadCalibrator
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.instance import Instance, InstanceServices
from supervisor.engine.states import WITHOUT_PROCESS, InstanceSnapshot, State
from supervisor.errors import DaemonBusy, NoSuchModel, SettingsInvalid
from supervisor.events import Emit
from supervisor.fleet import cache_commands
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.model import Model, Replica, name_for
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.start_memory import DeviceMemory, StartMemory
from supervisor.slot_store.manager import SlotManager
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.system.processor_load import ProcessorReading, read_this_processor

if TYPE_CHECKING:
    from proxy.router.router import Router

# A start is over when the instance serves or the cause of its failure is known: in BACKOFF it will
# be started again.
START_OVER: Final = frozenset({State.READY, State.FAILED, State.BACKOFF, State.STOPPED})
_DOWN: Final = frozenset({State.STOPPED})
# The commands, with the states in which they are over; a restart leaves each of these at once.
_COMMANDS: Final = {
    "stop": (Instance.stop, _DOWN),
    "start": (Instance.start, START_OVER),
    "restart": (Instance.restart, START_OVER),
}

Result = TypeVar("Result")


class Fleet:
    """All instances of all models.

    `models` are in the order of the settings, removed ones last; `planner` plans each start.
    """

    def __init__(self, planner: LaunchPlanner, traffic: Router, emit: Emit) -> None:
        self._traffic = traffic
        traffic.signals.overdue.connect(self._mark_overdue)
        traffic.signals.restore_verified.connect(self._check_restore)
        traffic.signals.file_outdated.connect(self._delete_file)
        self._emit = emit
        self.planner = planner
        self.slot_files = SlotFiles(lambda: self.planner.launches.slot_persistence, traffic, emit)
        self.slot_storage = cache_commands.SlotStorage(self.slot_files, self.find)
        self.device_memory = DeviceMemory()
        self._start_memory = StartMemory(self.device_memory, emit)
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.models: dict[str, Model] = {}
        for entry in planner.entries.values():
            self.models[entry.name] = Model(entry, planner.model_settings(entry.name))
            for place in planner.replicas_of(entry.name):
                self.add(place, planner)

    async def serve(self) -> None:
        """Serve all instances until cancelled; then kill the remaining processes."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(persist("slot files", self.slot_files.serve))
                for replica in self.all_replicas():
                    self._serve(replica)
                # Until cancelled; instances may be added.
                await asyncio.get_running_loop().create_future()
        finally:
            for task in self._tasks:
                task.cancel()

    # Queries.

    def all_replicas(self) -> tuple[Replica, ...]:
        """Return all replicas, including replacements and those that retire."""
        return tuple(replica for model in self.models.values() for replica in model.all_replicas)

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(replica for model in self.models.values() for replica in model.replicas)

    def replica(self, instance: str) -> Replica:
        return next(replica for replica in self.all_replicas() if replica.name == instance)

    def find(self, instance: str) -> Replica | None:
        return next((replica for replica in self.all_replicas() if replica.name == instance), None)

    def cause_of(self, instance: str) -> FailureCause | None:
        """Return why the process of an instance last ended, if that was a failure."""
        replica = self.find(instance)
        return replica.instance.snapshot().cause if replica else None

    def is_retiring(self, replica: Replica) -> bool:
        return replica in self.models[replica.place.model].retiring

    def select(self, names: Sequence[str] = ()) -> list[Model]:
        """Return the named models, or all. Raises NoSuchModel: a name is not configured."""
        known = [name for name, model in self.models.items() if model.is_configured]
        for name in names:
            if name not in known:
                there = ", ".join(known) or "none"
                raise NoSuchModel(f"no model is named {name!r}", hint=f"models: {there}")
        return [self.models[name] for name in names or known]

    def selected_replicas(self, names: Sequence[str] = ()) -> list[Replica]:
        """Return the replicas of the named models, or of all, except those that retire."""
        models = self.select(names)
        return [replica for model in models for replica in (*model.replicas, *model.replacements)]

    # Commands.

    def command(self, verb: str, names: Sequence[str] = ()) -> Callable[[], bool]:
        """Start, stop or restart models; return a function that tells whether that is over.

        Raises NoSuchModel, SettingsInvalid: a name or the verb is unknown; nothing was changed.
        """
        instances = [replica.instance for replica in self.selected_replicas(names)]
        if verb not in _COMMANDS:
            raise SettingsInvalid(f"no command is named {verb!r}")
        command, done = _COMMANDS[verb]
        for instance in instances:
            command(instance)
        return lambda: all(instance.snapshot().state in done for instance in instances)

    def spawn(self, work: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        """Start a task that is cancelled with the fleet. Raises DaemonBusy: it is not serving."""
        if self._group is None:
            work.close()
            raise DaemonBusy("the daemon is stopping", hint="corral start starts another")
        # Not in the group, because its failure must not end the other tasks.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)
        return task

    def _note_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            FAILURES.note("fleet task", error)

    async def all_down(self) -> None:
        """Wait until each instance has been STOPPED, including those that retire."""
        for replica in self.all_replicas():
            await replica.instance.wait(_DOWN)

    # Reports of the proxy; an instance may be gone by then.

    def _mark_overdue(self, upstream: Upstream, reason: str) -> None:
        if replica := self.find(upstream.name):
            replica.instance.mark_overdue(replica.instance.snapshot().run, reason)

    def worker_ended(self, name: str) -> None:
        """Replace the processes that used a worker: they would fail with their next request."""
        for replica in self.all_replicas():
            if replica.plan and name in {worker.name for worker in replica.plan.workers}:
                run = replica.instance.snapshot().run
                replica.instance.mark_overdue(run, f"worker {name} has ended")

    def _delete_file(self, name: str) -> None:
        self.slot_files.start(self.slot_files.delete([name]), f"delete {name}")

    def _check_restore(self, instance: str, tokens: int, timings: Timings) -> None:
        """Stop saving and restoring slots of a model whose engine does not use restored slots."""
        replica = self.find(instance)
        if replica is None or replica.slots.check_restore(tokens, timings):
            return
        self.slot_files.catalogue.remove_all(replica.cache_key)
        for other in self.models[replica.place.model].all_replicas:
            snapshot = other.instance.snapshot()
            if snapshot.state is State.READY:
                self._admit(other, snapshot)  # without its cache key

    # Changes. None of these waits; the rest of the work runs in tasks.

    def set_planner(self, planner: LaunchPlanner) -> None:
        """Apply the models of new settings, in their order."""
        self.planner = planner
        self.slot_files.check_keys()
        before, self.models = self.models, {}
        for name, entry in planner.entries.items():
            settings = planner.model_settings(name)
            self.models[name] = before.get(name) or Model(entry, settings)
            self.models[name].residency = settings
        self.models |= before

    def add(self, place: ReplicaId, planner: LaunchPlanner) -> Replica:
        replica = self._make(place, planner)
        model = self.models[place.model]
        if not model.is_configured:
            model.entry = planner.entry(place.model)
        model.set_replica(replica)
        return replica

    def add_beside(self, old: Replica, planner: LaunchPlanner) -> Replica:
        """Make a replica that will replace `old`, which serves meanwhile."""
        replica = self._make(old.place, planner)
        self.models[old.place.model].replacements += (replica,)
        return replica

    def replace(self, old: Replica, new: Replica) -> None:
        """Retire a replica in favour of one made with `add_beside`."""
        self.models[old.place.model].set_replica(new)
        self.apply_settings(new, new.planner)
        self.retire(old)

    def apply_settings(self, replica: Replica, planner: LaunchPlanner) -> None:
        """Use another planner for the next runs of a replica."""
        replica.planner = planner
        policy = planner.restart_policy(replica.place.model)
        replica.instance.configure(self.planner.supervisor, policy)
        model = self.models[replica.place.model]
        model.entry = planner.entry(replica.place.model)
        snapshot = replica.instance.snapshot()
        if snapshot.state is State.READY:
            self._admit(replica, snapshot)  # with its new aliases

    def retire(self, replica: Replica) -> None:
        """Drain, stop and forget a replica, in the background."""
        self.models[replica.place.model].retire(replica)
        replica.instance.stop()
        if self._group:
            self._group.create_task(
                persist("retiring", lambda: self._retire(replica)), name=f"{replica.name} retires"
            )

    def _make(self, place: ReplicaId, planner: LaunchPlanner) -> Replica:
        name = name_for(place, {replica.name for replica in self.models[place.model].all_replicas})
        replica = Replica(place, name, planner, self._slot_manager, self._instance)
        self._serve(replica)
        return replica

    def _instance(self, replica: Replica) -> Instance:
        model = replica.place.model
        return Instance(
            name=replica.name,
            model=model,
            services=InstanceServices(
                launch=replica.launch,
                traffic=self._traffic,
                admit=lambda snapshot: self._admit(replica, snapshot),
                emit=self._emit_change,
                persister=replica.slots,
                needs_restart=self._calibrator(replica).needs_restart,
                prepare=lambda: self._prepare(replica),
                reduce=lambda cause: self._reduce(replica, cause),
            ),
            limits=self.planner.supervisor,
            policy=replica.planner.restart_policy(model),
        )

    def _calibrator(self, replica: Replica) -> ThreadCalibrator:
        def is_at_rest(other: Replica) -> bool:  # it neither computes nor loads
            state = other.instance.snapshot().state
            is_idle = state is State.READY and not self._traffic.activity(other.name).in_flight
            return is_idle or state in WITHOUT_PROCESS

        def read_processor() -> ProcessorReading:
            engines = (other.instance.snapshot().pid for other in self.all_replicas())
            return read_this_processor([os.getpid(), *filter(None, engines)])

        return ThreadCalibrator(
            plan=lambda: replica.plan,
            plan_again=lambda: replica.planner.plan_at(replica.place),
            store=lambda plan: replica.planner.measurements(plan.gguf.path, plan.engine),
            is_alone=lambda: all(
                is_at_rest(other) for other in self.all_replicas() if other is not replica
            ),
            read=read_processor,
            emit=functools.partial(self._emit, instance=replica.name, model=replica.place.model),
        )

    async def _prepare(self, replica: Replica) -> None:
        """Wait for the workers and the memory of a start; raises CorralError without them."""
        planner, model = replica.planner, replica.place.model
        is_ready = False
        while not is_ready:
            if planner.workers.addresses_of(model):
                for reason in await planner.workers.ask(model, planner.engine_at(replica.place)):
                    self._emit("worker.lost", model=model, reason=reason)
            is_ready = await self._start_memory.is_there(replica)

    def _reduce(self, replica: Replica, cause: FailureCause) -> bool:
        """Plan less for a model whose start ran out of memory, unless another instance serves."""
        replicas = self.models[replica.place.model].all_replicas
        others = (other for other in replicas if other is not replica)
        if any(other.instance.snapshot().state is State.READY for other in others):
            return False
        return self._start_memory.reduce(replica, cause)

    def _admit(self, replica: Replica, snapshot: InstanceSnapshot) -> None:
        upstream = replica.upstream(snapshot, self.models[snapshot.model].entry.aliases)
        self._traffic.admit(upstream, replica.slots.restored_slots(snapshot.run), self.slot_storage)

    def _emit_change(self, name: str, /, **fields: object) -> None:
        self._emit(name, **fields)
        if name == "instance.exited":
            replica = self.find(str(fields["instance"]))
            if replica and replica.plan and replica.plan.memory_inputs.engine.devices:
                self.device_memory.note_exit(self.planner.supervisor.device_memory_wait_s)

    def _slot_manager(self, replica: Replica) -> SlotManager:
        def model() -> Model:
            return self.models[replica.place.model]

        return SlotManager(
            instance=replica.name,
            model=replica.place.model,
            replica=lambda: (replica.place.number, max(1, len(model().replicas))),
            plan=lambda: replica.plan,
            persistence=lambda: replica.planner.launches.slot_persistence,
            files=self.slot_files,
            fingerprints=lambda slots: self._traffic.conversation_fingerprints(replica.name, slots),
            is_elsewhere=lambda conversation: self._is_elsewhere(replica, conversation),
            save_predecessors=lambda: cache_commands.save_predecessors(model(), replica),
            emit=self._emit,
        )

    def _is_elsewhere(self, replica: Replica, conversation: ConversationFingerprint) -> bool:
        """Return whether a conversation is on an instance that a replica will not replace."""
        owner = self._traffic.conversation_owner(conversation)
        other = self.find(owner) if owner else None
        if other is None or other.place == replica.place:
            return False
        return other.instance.snapshot().state is State.READY

    def _serve(self, replica: Replica) -> None:
        if self._group:
            replica.life = self._group.create_task(
                persist("instance", replica.instance.serve), name=replica.name
            )

    async def _retire(self, replica: Replica) -> None:
        await replica.instance.wait(_DOWN)  # the limits of its states are the deadline
        if replica.life:
            replica.life.cancel()
            await asyncio.wait([replica.life])
        model = self.models[replica.place.model]
        model.forget(replica)
        if not model.all_replicas:
            del self.models[replica.place.model]
