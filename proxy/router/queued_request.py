"""A request that waits for its turn, and what it makes of the instances it sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.prompt import session_hash
from proxy.request import ProxyRequest
from proxy.router.fair_queue import QueueEntry
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.router.policy import Candidate, Choice, choose
from proxy.settings import Policy


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """A request in line.

    Attributes:
        request: The request.
        avoid: Names of instances to take only if there is no other.
        session: The mark of the client's own name for the conversation, or None.
        lease: What it got, or None.
        position: Its place when it joined, 1 for the next in turn; 0 if it got a slot at once.
        wake: Set when it got a lease, and when nobody is left who could give it one.
    """

    request: ProxyRequest
    avoid: Collection[str] = ()
    session: int | None = None
    lease: Lease | None = None
    position: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


def queued(request: ProxyRequest, avoid: Collection[str], now_s: float) -> QueuedRequest:
    """Return a request as one that begins to wait now."""
    return QueuedRequest(
        client=request.client,
        priority=request.priority,
        joined_at_s=now_s,
        timeout_s=request.queue_timeout_s,
        request=request,
        avoid=avoid,
        session=session_hash(request.model, request.client, request.session)
        if request.session
        else None,
    )


class RoutingView:
    """The instances of one model at one moment, as those who wait see them, one after the other.

    Args:
        instances: Those that are admitted.
        prefix_index: What is believed of their caches.
        policy: The rule by which is chosen.
        held_s: How long a request holds a slot, on average.
        now_s: The moment.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        prefix_index: PrefixIndex,
        policy: Policy,
        *,
        held_s: float,
        now_s: float,
    ) -> None:
        self._instances = instances
        self._prefix_index = prefix_index
        self._policy = policy
        self._held_s = held_s
        self._now_s = now_s
        self._homes: Mapping[str, int] | None = None
        self._bound_for: Counter[str] = Counter()
        self._kept: set[Instance] = set()

    @property
    def has_room(self) -> bool:
        """Return whether any slot is free."""
        return any(instance.has_free_slot for instance in self._instances)

    def choice(self, queued: QueuedRequest) -> Choice:
        """Return what a request would do; those who wait for their home are remembered."""
        request = queued.request
        instances = [
            one for one in self._instances if one.may_take(request) and one not in self._kept
        ]
        if len(instances) == 1 and instances[0].has_room_for(request):  # as it is with most models
            return Choice(instances[0].upstream.name)
        prompt = queued.request.prompt
        policy = "least-busy" if prompt is None and self._policy == "affinity" else self._policy
        home = self._prefix_index.owner(prompt, queued.session) if policy == "affinity" else None
        others = [instance for instance in instances if instance.upstream.name not in queued.avoid]
        candidates = [self._candidate(instance, queued) for instance in others or instances]
        tokens = prompt.tokens if prompt else 0
        choice = choose(policy, candidates, tokens, home, self._now_s - queued.joined_at_s)
        if choice.name is None and home is not None:
            self._bound_for[home] += 1
        if choice.name is None and request.slots > 1:
            self._keep(instances, request, home)
        return choice

    def _keep(self, instances: Sequence[Instance], request: ProxyRequest, home: str | None) -> None:
        """Keep an instance's slots for a request that needs several.

        Those behind it would else take each slot as it falls free. It is its home's, or that of
        which the fewest are missing.
        """
        if instances:
            self._kept.add(
                min(
                    instances,
                    key=lambda one: (one.upstream.name != home, one.needed(request) - one.free),
                )
            )

    def _candidate(self, instance: Instance, queued: QueuedRequest) -> Candidate:
        name, slots = instance.upstream.name, instance.upstream.slots
        if self._homes is None:
            self._homes = self._prefix_index.conversations_per_instance(instance.upstream.model)
        turns = 0 if instance.has_room_for(queued.request) else 1 + self._bound_for[name]
        return Candidate(
            name=name,
            slots=slots,
            slots_in_use=len(instance.leases),
            last_used=instance.last_used,
            conversations=self._homes.get(name, 0),
            cached_tokens=self._prefix_index.cached_tokens(name, queued.request.prompt),
            backlog_tokens=instance.backlog_tokens,
            prefill_tps=instance.rates.prefill_tps,
            free_in_s=turns * self._held_s / slots,
            is_spare=instance.upstream.node is not None and instance.upstream.node.is_spare,
            needed=instance.needed(queued.request),
        )
