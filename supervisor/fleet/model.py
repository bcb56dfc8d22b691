"""A configured model and its replicas; its availability, caches and use of GPUs.

While settings change, a ReplicaId can have several instances: the serving one, its replacement, and
retiring ones. Their names differ: `chat.0`, then `chat.0~2`, then `chat.0` again once that is free.
Model names have no tilde, so sockets and logs named after instances never clash.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

from proxy.request.models import GpuUse
from proxy.upstream.upstream import Upstream
from supervisor.engine.instance import Instance
from supervisor.engine.launch import Launch
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.fleet.launches import LaunchFingerprint, ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import size
from supervisor.plan import kv_cache
from supervisor.plan.auto import count_of
from supervisor.plan.context import context_layout
from supervisor.plan.estimate import Estimate
from supervisor.plan.kv_cache import BYTES_PER_VALUE, PADDING_TOKENS, Cache, layer_bytes
from supervisor.plan.plan import Plan
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import SettingsByFlag
from supervisor.rpc.relay import ShardRun
from supervisor.settings.schema import ResidencyPolicy
from supervisor.slot_store.file_index import key_digest
from supervisor.slot_store.manager import SlotManager
from supervisor.slot_store.manifest import cache_key
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.store_config import SLOT_DIRECTORY

Availability = Literal["loaded", "loading", "unloaded", "failed"]

_LOADING: Final = frozenset({State.STARTING, State.WARMING, State.BACKOFF})
_LOADED: Final = frozenset({State.READY, State.UNHEALTHY})


# A start of a failed model would fail again.
Phase = Literal["down", "loading", "loaded", "unloading", "failed"]


def snapshots_of(model: Model) -> list[InstanceSnapshot]:
    return [replica.instance.snapshot() for replica in model.replicas]


def phase_of(model: Model, snapshots: Sequence[InstanceSnapshot]) -> Phase:
    states = {snapshot.state for snapshot in snapshots}
    if states & _LOADED:
        return "loaded"
    if states & _LOADING:
        return "loading"
    if states & {State.DRAINING, State.STOPPING, State.KILLING}:
        return "unloading"
    return "failed" if State.FAILED in states or not model.is_open else "down"


def availability(model: Model) -> tuple[Availability, str | None]:
    """Return whether a model serves, and the cause of its failure or last failed load."""
    snapshots = [replica.instance.snapshot() for replica in (*model.replicas, *model.replacements)]
    if any(snapshot.state is State.READY for snapshot in snapshots):
        return "loaded", None
    if any(snapshot.wanted and snapshot.state is not State.FAILED for snapshot in snapshots):
        causes = (snapshot.cause.sentence for snapshot in snapshots if snapshot.cause)
        return "loading", next(causes, None)
    failed = (snapshot.cause for snapshot in snapshots if snapshot.state is State.FAILED)
    if reason := next((cause.sentence for cause in failed if cause), model.refusal):
        return "failed", reason
    if model.is_open:
        return "unloaded", None
    return "failed", f"it is stopped (corral start {model.entry.name})"


def cache_sizes(plan: Plan) -> tuple[float, int, float]:
    """Return `token_bytes`, `state_bytes` and `host_cache_bytes` of the proxy's `Upstream`."""
    inputs = plan.memory_inputs
    layout = context_layout(inputs.gguf, inputs.chosen, inputs.engine)
    type_k, type_v = layout.cache.type_k, layout.cache.type_v
    token_bytes, fixed_bytes = 0.0, kv_cache.state_bytes(plan.gguf)  # unknown
    if {type_k, type_v} <= BYTES_PER_VALUE.keys():
        padding = Cache(PADDING_TOKENS, type_k=type_k, type_v=type_v, full_window=True)
        sizes_bytes = layer_bytes(plan.gguf, padding)
        token_bytes = sum(sizes_bytes) / PADDING_TOKENS
        if plan.window_tokens:
            windowed = sum(itertools.compress(sizes_bytes, plan.gguf.sliding)) / PADDING_TOKENS
            token_bytes -= windowed
            fixed_bytes += round(windowed * plan.window_tokens)
    size_bytes = layout.prompt_cache_bytes
    return token_bytes, fixed_bytes, math.inf if size_bytes < 0 else size_bytes


def saved_room(plan: Plan, budget: DiskBudget) -> tuple[int, str]:
    """Return how many conversations that fill a slot fit on the disk, and a clause about that."""
    token_bytes, state_bytes, _ = cache_sizes(plan)
    tokens, room_bytes = plan.ctx_size // max(1, plan.slots), budget.model_bytes
    full_bytes = round(tokens * token_bytes + state_bytes)
    count = room_bytes // max(1, full_bytes)
    source = " (auto)" if budget.is_auto else ""
    held = f"{count_of(count, 'conversation')} of {tokens} tokens, {size(full_bytes)} each"
    return count, f"{size(room_bytes)} of disk{source} hold {held}"


def ready_estimates(model: Model | None) -> list[Estimate]:
    """Return the memory estimates of the instances that serve; none if a reload removed it."""
    return [
        replica.plan.estimate
        for replica in (model.replicas if model else ())
        if replica.plan and replica.instance.snapshot().state is State.READY
    ]


# For the engine, a worker on another machine is a device, even if it computes on a CPU.
_REMOTE: Final = "RPC"


def gpu_use(estimates: Iterable[Estimate]) -> GpuUse:
    layers, memory_bytes, devices = 0, 0, dict[str, None]()
    for estimate in estimates:
        gpus = {
            name: memory
            for name, memory in estimate.devices.items()
            if not name.startswith(_REMOTE) and memory.total
        }
        layers = max(layers, sum(estimate.device_layers.get(name, 0) for name in gpus))
        memory_bytes += sum(memory.total for memory in gpus.values())
        devices |= dict.fromkeys(gpus)
    return GpuUse(layers, memory_bytes, tuple(devices))


class Replica:
    """An instance and its settings; the task `life` serves it."""

    def __init__(
        self,
        place: ReplicaId,
        name: str,
        planner: LaunchPlanner,
        slots: Callable[[Replica], SlotManager],
        instance: Callable[[Replica], Instance],
    ) -> None:
        self.place = place
        self.name = name
        self.planner = planner  # plans its next run
        # Of its latest run: `shards` is None without workers, `cache_key` is empty if the
        # engine cannot save slots, `prompts` were prefilled.
        self.plan: Plan | None = None
        self.fingerprint: LaunchFingerprint | None = None
        self.shards: ShardRun | None = None
        self.cache_key = ""
        self._cache_sizes = (0.0, 0, 0.0)
        self.prompts: Sequence[WarmPrompt] = ()
        self.life: asyncio.Task[None] | None = None
        # Free bytes of each device, if known, when its next run was prepared.
        self.free_bytes: Mapping[str, int] = {}
        self.attempted: SettingsByFlag = {}  # the reductions of its latest start
        self.slots = slots(self)
        self.instance = instance(self)

    def launch(self, _run: int) -> Launch:
        """Plan a run; reads files for some milliseconds."""
        plan = self.planner.plan_at(self.place, self.free_bytes)
        self.fingerprint = self.planner.fingerprint(self.place, plan.engine)
        self.plan, self.attempted = plan, plan.reduced
        self.cache_key = key_digest(plan.model, cache_key(plan)) if plan.has_own_slots else ""
        self._cache_sizes = cache_sizes(plan)
        self.shards = self.planner.shards(plan)
        try:
            launch = self.planner.launches.launch(plan, self.name, self.shards)
        except BaseException:
            if self.shards:
                self.shards.close()
            raise
        self.prompts = launch.prompts
        if SLOT_DIRECTORY not in launch.argv:
            self.cache_key = ""
        return launch

    def upstream(self, snapshot: InstanceSnapshot, aliases: tuple[str, ...]) -> Upstream:
        plan, endpoint = self.plan, snapshot.endpoint
        trial = self.planner.trial_at(self.place)
        token_bytes, state_bytes, host_cache_bytes = self._cache_sizes
        return Upstream(
            name=snapshot.name,
            model=snapshot.model,
            slots=plan.slots if plan else 1,
            socket=str(endpoint.socket) if endpoint.socket else None,
            host=endpoint.host,
            port=endpoint.port,
            api_key=snapshot.api_key,
            aliases=aliases,
            can_name_slots=plan is not None and plan.has_own_slots,
            is_speculative=plan is not None and plan.is_speculative,
            reports_exit=True,
            gpu_layers=gpu_use([plan.estimate]).layers if plan else 0,
            trial_share=trial.share if trial else 0.0,
            resumable_prompts=plan.resumable_prompts if plan else 0,
            window_tokens=plan.window_tokens if plan else 0,
            micro_batch_tokens=plan.micro_batch_tokens if plan else 0,
            prefer_pure_decode=self.planner.entry(snapshot.model).batching.prefer_pure_decode,
            cache_key="" if self.slots.reason else self.cache_key,
            token_bytes=token_bytes,
            state_bytes=state_bytes,
            host_cache_bytes=host_cache_bytes,
            reuses_vectors=bool(plan and plan.embedding and plan.embedding.can_split),
        )


class Model:
    def __init__(self, entry: ModelEntry, residency: ResidencyPolicy) -> None:
        self.entry = entry
        self.residency = residency
        self.is_open = True  # whether a request loads it; False after a command stopped it
        self.refusal: str | None = None  # why the latest load was refused
        # Ordered by number; empty once the model is removed from the settings.
        self.replicas: tuple[Replica, ...] = ()
        self.replacements: tuple[Replica, ...] = ()  # these start to replace one of the above
        self.retiring: tuple[Replica, ...] = ()  # these finish their requests

    @property
    def is_configured(self) -> bool:
        return bool(self.replicas)

    @property
    def all_replicas(self) -> tuple[Replica, ...]:
        return (*self.replicas, *self.replacements, *self.retiring)

    @property
    def plan(self) -> Plan | None:
        """The latest plan of one of its replicas; None before the first."""
        return next((replica.plan for replica in self.all_replicas if replica.plan), None)

    @property
    def slots(self) -> int:
        """Slots of all replicas; a replica without a plan counts as the first one with a plan."""
        first = self.plan
        plans = (replica.plan or first for replica in self.replicas)
        return sum(plan.slots for plan in plans if plan)

    @property
    def is_wanted(self) -> bool:
        return any(replica.instance.snapshot().wanted for replica in self.replicas)

    def at(self, number: int) -> Replica:
        return next(replica for replica in self.replicas if replica.place.number == number)

    def set_replica(self, new: Replica) -> None:
        """Make a replica the current one of its place; the caller retires its predecessor."""
        others = [replica for replica in self.replicas if replica.place != new.place]
        self.replacements = tuple(replica for replica in self.replacements if replica is not new)
        self.replicas = tuple(sorted([*others, new], key=lambda replica: replica.place))

    def retire(self, replica: Replica) -> None:
        self.replicas = tuple(other for other in self.replicas if other is not replica)
        self.replacements = tuple(other for other in self.replacements if other is not replica)
        self.retiring += (replica,)

    def forget(self, replica: Replica) -> None:
        self.retiring = tuple(other for other in self.retiring if other is not replica)


def name_for(place: ReplicaId, taken: Collection[str]) -> str:
    name, generation = str(place), 1
    while name in taken:
        generation += 1
        name = f"{place}~{generation}"
    return name
