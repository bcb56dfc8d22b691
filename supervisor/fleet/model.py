"""A configured model and its replicas.

While settings change, a ReplicaId can have three instances: one that serves, its replacement, and
retiring ones. Their names differ: `chat.0`, then `chat.0~2`, then `chat.0` again once that is free.
Model names have no tilde, so sockets and logs named after instances never clash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from proxy.upstream.upstream import BATCH_TOKENS, Upstream
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.flags.setting import Settings
from supervisor.fleet.cache_properties import CacheProperties, cache_properties
from supervisor.fleet.gpu_use import gpu_use
from supervisor.fleet.launch_id import LaunchFingerprint, ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.instance.instance import Instance
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.process.launch import Launch
from supervisor.settings.schema import ResidencyPolicy
from supervisor.shards.run import ShardRun
from supervisor.slot_store.config import SLOT_DIRECTORY
from supervisor.slot_store.manager import SlotManager
from supervisor.warmup.prompts import WarmPrompt


class Replica:
    """An instance and the settings that it is made from; `life` is the task that serves it."""

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
        self.planner = planner  # of its next run
        self.plan: Plan | None = None  # of its latest run
        self.fingerprint: LaunchFingerprint | None = None  # likewise
        self.shards: ShardRun | None = None  # likewise; None without workers
        self.caches = CacheProperties()  # likewise; without a cache key if it cannot save slots
        self.prompts: Sequence[WarmPrompt] = ()  # prefilled in its latest run
        self.life: asyncio.Task[None] | None = None
        # Free bytes of each device when its next run was prepared, where that is known.
        self.free_bytes: Mapping[str, int] = {}
        self.attempted: Settings = {}  # what its latest start did without, successful or not
        self.slots = slots(self)
        self.instance = instance(self)

    def launch(self, _run: int) -> Launch:
        """Plan a run; reads files for some milliseconds."""
        plan = self.planner.plan_at(self.place, self.free_bytes)
        self.fingerprint = self.planner.fingerprint(self.place, plan.engine)
        self.plan, self.attempted = plan, plan.reduced
        self.caches = cache_properties(plan)
        self.shards = self.planner.shards(plan)
        try:
            launch = self.planner.launches.launch(plan, self.name, self.shards)
        except BaseException:
            if self.shards:
                self.shards.close()
            raise
        self.prompts = launch.prompts
        if SLOT_DIRECTORY not in launch.argv:
            self.caches = replace(self.caches, cache_key="")
        return launch

    def upstream(self, snapshot: InstanceSnapshot, aliases: tuple[str, ...]) -> Upstream:
        plan, endpoint = self.plan, snapshot.endpoint
        trial = self.planner.places.trial_at(self.place)
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
            batch_tokens=plan.batch_tokens if plan else BATCH_TOKENS,
            has_window=plan is not None and plan.has_window,
            prefer_pure_decode=self.planner.entry(snapshot.model).batching.prefer_pure_decode,
            cache_key="" if self.slots.reason else self.caches.cache_key,
            token_bytes=self.caches.token_bytes,
            state_bytes=self.caches.state_bytes,
            host_cache_bytes=self.caches.host_cache_bytes,
            reuses_vectors=bool(plan and plan.embedding and plan.embedding.can_split),
        )


class Model:
    """A configured model."""

    def __init__(self, entry: ModelEntry, residency: ResidencyPolicy) -> None:
        self.entry = entry
        self.residency = residency
        # Whether a request loads it; not after it was stopped by command.
        self.is_open = True
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
        return next((one.plan for one in self.all_replicas if one.plan), None)

    @property
    def slots(self) -> int:
        """Slots of all replicas; one that was not planned yet counts as the first that was."""
        first = self.plan
        plans = (replica.plan or first for replica in self.replicas)
        return sum(plan.slots for plan in plans if plan)

    @property
    def is_wanted(self) -> bool:
        return any(one.instance.snapshot().wanted for one in self.replicas)

    def at(self, number: int) -> Replica:
        return next(one for one in self.replicas if one.place.number == number)

    def set_replica(self, new: Replica) -> None:
        """Make a replica the current one; the caller retires the one before."""
        others = [one for one in self.replicas if one.place != new.place]
        self.replacements = tuple(one for one in self.replacements if one is not new)
        self.replicas = tuple(sorted([*others, new], key=lambda one: one.place))

    def add_replacement(self, replica: Replica) -> None:
        self.replacements = (*self.replacements, replica)

    def retire(self, replica: Replica) -> None:
        self.replicas = tuple(one for one in self.replicas if one is not replica)
        self.replacements = tuple(one for one in self.replacements if one is not replica)
        self.retiring = (*self.retiring, replica)

    def forget(self, replica: Replica) -> None:
        self.retiring = tuple(one for one in self.retiring if one is not replica)


def name_for(place: ReplicaId, taken: Collection[str]) -> str:
    """Return the first free name for an instance."""
    name, generation = str(place), 1
    while name in taken:
        generation += 1
        name = f"{place}~{generation}"
    return name
