"""The requests that wait for one model: their order, their limit, and which gets a free slot.

1. `interactive` goes before `batch`. To prevent starvation, one batch request is served after eight
   interactive ones, and after every interactive one once the first batch request has waited half of
   its timeout; never two in a row while interactive requests wait.
2. Within a priority, clients share: each request gets a tag, one more than the client's previous
   tag, and at least the priority's own time; the lowest tag is first. A client with a hundred
   requests and one with a single request alternate. The priority's time advances by one while each
   waiting client is served once, so newcomers do not delay clients that waited before them.
3. Within a priority, one client's requests keep their order.

A request may be held back although a slot is free, for five reasons.

- An instance that prefers pure decode computes one prompt after the other while sequences decode,
  the shortest first. An engine computes prompts in the same passes in which it decodes, so every
  pass with prompt tokens makes all running streams pause longer, and two prompts at once are no
  faster: the engine computes the second after the first.
- Two prompts with the same beginning, sent at once, would both compute all of it, in turns, and
  take twice as long. So the second waits until the first is answered, if answers take less time
  than the beginning; then an idle slot, the host cache or a file has it. The cost is a longer wait
  if the answer takes longer than expected, at most twice as long.
- Of two prompts with the same beginning on two instances, one computes it, and saves it to a file
  before it goes on; the other waits for the file if that takes at most a quarter longer than to
  compute the beginning as well.
- A batch fills every idle slot, so each interactive request would wait for the end of an answer of
  the batch. So for 30 s after an interactive request, batch requests leave one slot free, if
  instances that are not spare have several.
- The slot is held for the next turn of a conversation that has called tools (`slot_holds`).

Source: start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from proxy.cache.index import CacheHint, PrefixIndex, most_tokens
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, session_hash, shared_blocks
from proxy.cache.save_policy import SaveCase, is_worth_saving
from proxy.cache.shared_prefixes import BEGINNING_BLOCKS_MIN, BeginningUse
from proxy.request.request import Priority, ProxyRequest
from proxy.router.candidates import Candidates
from proxy.router.lease import FEW_TOKENS, Clock, Lease, LeaseTimes, RoutingTarget, SlotYielded
from proxy.router.registry import Instances, ModelInstances
from proxy.router.slot_holds import SlotHolds
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Upstream

_TURNS_BEFORE_BATCH: Final = 8
_OVERDUE: Final = 0.5
# Clients remembered beyond those in the queue, until their tags are dropped as useless.
_CLIENTS_MAX: Final = 256
_NONE: Final[Mapping[str, float]] = MappingProxyType({})
_CHATS: Final = frozenset({EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES})


@dataclass(slots=True, eq=False)
class QueuedRequest:
    request: ProxyRequest
    joined_at_s: float  # Monotonic.
    avoid: Collection[str] = ()  # Names of instances to take only if there is no other.
    session: int | None = None  # The hash of the client's own name for the conversation, or None.
    tag: float = -1.0  # Its place in the priority's own time; set by the queue.
    number: int = 0  # Its place among equal tags; set by the queue.
    lease: Lease | None = None
    new_tokens: int = 0  # Prompt tokens to compute, as expected when it joined.
    owner: str | None = None  # The instance that owned its conversation when it joined.
    position: int = 0  # Place when it joined, from 1; 0 if it got a slot at once.
    # The owner for which it waits although another instance has a free slot, or None.
    awaited: RoutingTarget | None = None
    looks_again_at_s: float = 0.0  # Time at which it chooses again in any case.
    # Since when it waits for a request that computes its beginning; None: it never did.
    beginning_since_s: float | None = None
    # Instances whose free slots were held for others when it chose last; since when it waits for
    # such slots, and how long the requests before it would have taken then; None: it never did.
    withheld: Collection[str] = ()
    held_since_s: float | None = None
    turn_s: float | None = None
    yielded: SlotYielded | None = None  # How it yielded its last slot; then its wait has no limit.
    _wake: asyncio.Event | None = field(default=None, init=False)

    @property
    def wake(self) -> asyncio.Event:
        """Set when it gets a lease, and when no instance can give it one any more."""
        if self._wake is None:  # most requests never wait
            self._wake = asyncio.Event()
        return self._wake

    def is_overdue(self, now_s: float) -> bool:
        return now_s - self.joined_at_s >= _OVERDUE * self.request.queue_timeout_s


def queue_entry(
    request: ProxyRequest,
    avoid: Collection[str],
    now_s: float,
    yielded: SlotYielded | None = None,
) -> QueuedRequest:
    name, scales = request.session, request.prompt.scales if request.prompt else ()
    session = session_hash(request.model, request.client, name, scales) if name else None
    queued = QueuedRequest(request, now_s, avoid, session)
    if yielded:
        queued.yielded, (queued.tag, queued.number) = yielded, yielded.place
    return queued


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Numbers of waiting requests; `expected_wait_s` is for a request that joins now."""

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class RequestQueue:
    """The waiting requests of two priorities; the caller decides which join."""

    def __init__(self, model: str, settings: ProxySettings) -> None:
        self.model = model
        self.settings = settings
        self.count = 0  # The number of waiting requests.
        self.by_owner: Counter[str] = Counter()  # Number of interactive ones, by `owner`.
        self._with_tools = 0  # Number of interactive ones that offer tools.
        self._priorities: dict[Priority, _PriorityQueue] = {
            "interactive": _PriorityQueue(),
            "batch": _PriorityQueue(),
        }
        self._turns = 0

    def waiting(self, priority: Priority) -> int:
        return len(self._priorities[priority].entries)

    def is_full(self, priority: Priority) -> bool:
        limits = self.settings
        most = limits.queue_max if priority == "interactive" else limits.batch.config.queue_size
        return self.waiting(priority) > most

    def slots_wanted(self, priority: Priority) -> int:
        """Return the slots that the waiting requests of a priority need."""
        return sum(entry.request.slots for entry in self._priorities[priority].entries)

    def stats(self, now_s: float, expected_wait_s: float) -> QueueStats:
        waits = (
            now_s - entry.joined_at_s
            for priority in self._priorities.values()
            for entry in priority.entries
        )
        interactive, batch = self.waiting("interactive"), self.waiting("batch")
        return QueueStats(interactive, batch, max(waits, default=0.0), expected_wait_s)

    def join(self, entry: QueuedRequest) -> None:
        """Add an entry; an entry that was removed before returns to its place."""
        queue, client = self._priorities[entry.request.priority], entry.request.client
        if entry.tag < 0:
            entry.tag, entry.number = queue.next_turn(client)
            queue.number += 1
            queue.next_tags[client] = entry.tag + 1
        insort(queue.entries, entry, key=_turn)
        self._count(entry, 1)

    def leave(self, entry: QueuedRequest) -> None:
        queue, client = self._priorities[entry.request.priority], entry.request.client
        if entry in queue.entries:
            queue.entries.remove(entry)
            self._count(entry, -1)
            if queue.next_tags.get(client) == entry.tag + 1:
                queue.next_tags[client] = entry.tag

    def take(self, entry: QueuedRequest) -> None:
        """Serve an entry; it need not be the first."""
        queue = self._priorities[entry.request.priority]
        clients = {waiting.request.client for waiting in queue.entries}
        queue.entries.remove(entry)
        self._count(entry, -1)
        queue.time = max(queue.time + 1 / len(clients), entry.tag)
        if len(queue.next_tags) > len(clients) + _CLIENTS_MAX:
            later = ((client, tag) for client, tag in queue.next_tags.items() if tag > queue.time)
            queue.next_tags = dict(later)
        is_put_off = entry.request.priority == "interactive" and self.waiting("batch")
        self._turns = self._turns + 1 if is_put_off else 0

    def _count(self, entry: QueuedRequest, change: int) -> None:
        self.count += change
        if entry.request.priority == "interactive":
            self._with_tools += change if _offers_tools(entry) else 0
            if entry.owner:
                self.by_owner[entry.owner] += change

    def has_agents_beside(self, entry: QueuedRequest) -> bool:
        """Return whether other interactive requests wait that offer tools, as agents' turns do."""
        return self._with_tools > _offers_tools(entry)

    def order(self, now_s: float) -> Iterator[QueuedRequest]:
        return self._serve_order(
            self._priorities["interactive"].entries, self._priorities["batch"].entries, now_s
        )

    def order_with(self, entry: QueuedRequest, now_s: float) -> list[QueuedRequest]:
        """Return the order as if an entry had joined; sets only its tag and number."""
        priority, client = entry.request.priority, entry.request.client
        entry.tag, entry.number = self._priorities[priority].next_turn(client)
        entries = {name: list(queue.entries) for name, queue in self._priorities.items()}
        insort(entries[priority], entry, key=_turn)
        return list(self._serve_order(entries["interactive"], entries["batch"], now_s))

    def _serve_order(
        self, interactive: Iterable[QueuedRequest], batch: Iterable[QueuedRequest], now_s: float
    ) -> Iterator[QueuedRequest]:
        first, second, turns = deque(interactive), deque(batch), self._turns
        while first or second:
            is_due = second and turns >= (1 if second[0].is_overdue(now_s) else _TURNS_BEFORE_BATCH)
            if second and (is_due or not first):
                turns = 0
                yield second.popleft()
            else:
                turns += 1
                yield first.popleft()

    def position(self, entry: QueuedRequest, now_s: float) -> int:
        """Return the place of an entry, from 1; 0 if it is not in the queue."""
        before = (number for number, other in enumerate(self.order(now_s), 1) if other is entry)
        return next(before, 0)


class _PriorityQueue:
    def __init__(self) -> None:
        self.entries: list[QueuedRequest] = []  # In the order of their tags.
        self.time = 0.0
        self.next_tags: dict[str, float] = {}  # The tag of a client's next entry.
        self.number = 0  # Of the latest entry.

    def next_turn(self, client: str) -> tuple[float, int]:
        return max(self.time, self.next_tags.get(client, 0.0)), self.number + 1


def _offers_tools(entry: QueuedRequest) -> bool:
    return bool(entry.request.json.get("tools"))


def _turn(entry: QueuedRequest) -> tuple[float, int]:
    return entry.tag, entry.number


# The longest wait for other prompts, unless half of the request's own timeout is shorter.
WAIT_MAX_S: Final = 10.0
_TIMEOUT_SHARE: Final = 0.5
# Turns that the longest prompt loses: this many shorter ones of each client overtake it.
_OVERTAKEN: Final = 4.0


def prefill_wait_s(
    prefilling: int, decoding: int, new_tokens: int, waited_s: float, timeout_s: float
) -> float:
    """Return how long a prompt waits for others at most; 0 if it may begin.

    Args:
        prefilling: Prompts that the instance computes.
        decoding: Responses that it generates.
        new_tokens: Tokens of the prompt that it is expected to compute.
        waited_s: How long the request has waited.
        timeout_s: How long it may wait.
    """
    if new_tokens <= FEW_TOKENS or not (prefilling and decoding):
        return 0.0
    return max(0.0, min(WAIT_MAX_S, _TIMEOUT_SHARE * timeout_s) - waited_s)


def shortest_first(
    entries: Sequence[QueuedRequest], new_tokens: Callable[[QueuedRequest], int]
) -> list[QueuedRequest]:
    """Order waiting requests by their tokens to compute, without starving any.

    `entries` are in the order of the queue. Priorities keep their turns. A long prompt moves back
    by at most four of the queue's turns; newcomers get later turns, so it is served eventually.
    """
    most = max(map(new_tokens, entries), default=0) or 1

    def turn(entry: QueuedRequest) -> tuple[float, int]:
        return entry.tag + _OVERTAKEN * new_tokens(entry) / most, entry.number

    ordered = sorted(entries, key=turn)
    turns = {
        priority: iter([entry for entry in ordered if entry.request.priority == priority])
        for priority in {entry.request.priority for entry in entries}
    }
    return [next(turns[entry.request.priority]) for entry in entries]


# How much longer a prompt waits for its beginning than it would compute it: the machine, and so
# each other request, is spared the work.
_LONGER: Final = 1.25
# The shortest wait before the progress of another prompt is read again.
_LOOK_MIN_S: Final = 0.05
# A file is stored within this time after the engine wrote it, or not soon.
_STORED_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BeginningCase:
    """A prompt's beginning that another request computes, as seen from one instance.

    Attributes:
        left: Tokens of it that the other request has not computed yet.
        there_tps: Tokens that it computes per second.
        tokens: Tokens of it that the instance would have to compute.
        here_tps: Tokens that the instance would compute per second.
        backlog: Tokens of other prompts that it computes before.
        transfer_s: The time to save, store and restore it.
        waited_s: How long the request has waited.
        timeout_s: How long it may wait.
    """

    left: float
    there_tps: float
    tokens: float
    here_tps: float
    backlog: float = 0.0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    timeout_s: float = math.inf


def beginning_wait_s(case: BeginningCase) -> float:
    """Return how long to wait until the beginning comes from a file; 0: compute it now."""
    compute_s = (case.backlog + case.tokens) / case.here_tps
    wait_s = case.left / case.there_tps + case.transfer_s
    limit_s = min(_LONGER * compute_s + case.transfer_s, _TIMEOUT_SHARE * case.timeout_s)
    if wait_s > _LONGER * compute_s or case.waited_s >= limit_s:
        return 0.0
    return max(_LOOK_MIN_S, min(wait_s, limit_s - case.waited_s))


# A shorter common beginning is computed within a batch; waiting for it does not pay.
_BLOCKS_MIN: Final = 8
# The longest wait for it, relative to the expected time of the first request.
_PATIENCE: Final = 2.0
# How long batch requests leave a slot free after an interactive one.
_LEFT_S: Final = 30.0
# With more waiting requests or instances, a request that waits for its owner chooses again only
# when the owner has a free slot, or after `_LOOKS_AGAIN_S`: choices would cost more than they save.
# With more waiting requests, the turns of those that wait for other instances count: of few, some
# may wait for held slots, and estimates of their turns are poor.
_FEW_WAIT: Final = 16
_FEW_INSTANCES: Final = 16
_LOOKS_AGAIN_S: Final = 0.25
# A running batch request yields its slot within this time.
_YIELDS_S: Final = 1.0


class SlotAssignment:
    """Assigns the slots of one model.

    Its methods return instances that a request may not take now by name, each with the longest
    wait.

    Args:
        on_first_token: Called when a prompt is computed for which others may have waited.
    """

    def __init__(
        self,
        queue: RequestQueue,
        instances: Instances,
        prefix_index: PrefixIndex,
        clock: Clock,
        on_first_token: Callable[[], None],
    ) -> None:
        self.times = LeaseTimes()
        # Time after the latest `assign` at which its result may change without an event; infinity:
        # never.
        self.recheck_in_s = math.inf
        self.queue = queue
        self.instances = instances
        self.prefix_index = prefix_index
        self.clock = clock
        self.holds = SlotHolds(queue.model, prefix_index, queue.settings, clock)
        self._on_first_token = on_first_token
        self._beginnings = BeginningUse()
        self._turn = 0.0  # of the last instance that got a request, before it did
        self._interactive_ended_at_s = -math.inf

    def note_ended(self, request: ProxyRequest) -> None:
        if request.priority == "interactive":
            self._interactive_ended_at_s = self.clock()

    def order(self, entries: Iterable[QueuedRequest]) -> Iterable[QueuedRequest]:
        """Return waiting requests in the order in which their prompts would begin."""
        if not self._pure():
            return entries
        return shortest_first(tuple(entries), lambda queued: queued.new_tokens)

    def new_tokens(self, queued: QueuedRequest) -> int:
        """Return the tokens of a prompt to compute; 0 if nothing depends on them."""
        prompt, instances = queued.request.prompt, self._pure()
        if prompt is None or not instances:
            return 0
        hint = self.prefix_index.look_up(prompt, queued.session)
        return prompt.tokens - hint.cached_tokens(sum(instance.bit for instance in instances))

    def owner(self, queued: QueuedRequest) -> str | None:
        """Return the instance that owns a request's conversation; None if nothing depends on it."""
        of_model = self.instances.of_model(self.queue.model)
        if len(of_model.answering) < 2 or self.queue.settings.policy != "affinity":
            return None
        return self.prefix_index.look_up(queued.request.prompt, queued.session).owner

    def is_beside_free_slot(self) -> bool:
        """Return whether requests may wait for other prompts although a slot is free."""
        return any(instance.has_free_slot for instance in self._pure())

    def _pure(self) -> Sequence[RoutingTarget]:
        return self.instances.of_model(self.queue.model).pure

    def lease_only(self, queued: QueuedRequest) -> Lease | None:
        """Lease a slot of the only instance to a request that comes, if nothing else counts.

        So it is with most models. `assign` decides the same in more steps.
        """
        of_model, request = self.instances.of_model(self.queue.model), queued.request
        instances = of_model.answering
        if len(instances) != 1 or of_model.with_files or of_model.pure or self.holds.active:
            return None
        if request.priority == "batch" or not instances[0].can_take(request):
            return None
        return self._lease(queued, instances[0], None, self.clock())

    def assign(self, entries: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Lease a free slot to the first request that takes one; return that request."""
        of_model, now_s = self.instances.of_model(self.queue.model), self.clock()
        instances = of_model.answering
        self.recheck_in_s = math.inf
        if not of_model.has_free_slot:
            return None
        candidates: Candidates | None = None
        for queued in entries:
            if queued.awaited and (owner := self._awaited_owner(queued, of_model, now_s)):
                candidates = candidates or self._candidates(of_model)
                candidates.bind(owner)
                continue
            is_batch = queued.request.priority == "batch"
            left = self._instances_to_leave(queued, of_model, now_s) if is_batch else _NONE
            if left is None:
                continue
            # For each decision, because the caches change while a request waits.
            hint = self.prefix_index.look_up(queued.request.prompt, queued.session)
            may_hold = of_model.with_files or of_model.pure or self.holds.active
            held = self._held_instances(queued, of_model, left, hint, now_s) if may_hold else left
            is_only = len(instances) == 1 and candidates is None and not queued.request.is_branch
            is_only = is_only and not instances[0].upstream.is_all_or_nothing
            if is_only and instances[0].can_take(queued.request):
                if not held:
                    self._lease(queued, instances[0], hint, now_s)
                    return queued
                self._wait_again(queued, None, held, now_s)
                continue
            candidates = candidates or self._candidates(of_model)
            waited_s = now_s - queued.joined_at_s
            request = queued.request
            chosen, moves_in_s = candidates.choice(request, queued.avoid, hint, waited_s, held)
            if chosen:
                is_diverted = candidates.is_diverted(request, hint, chosen)
                lease = self._lease(queued, chosen, hint, now_s)
                lease.is_diverted = is_diverted
                lease.beginning_blocks = self._beginning_to_save(lease, of_model)
                self._count_turn(chosen, of_model.sets.weight(chosen))
                return queued
            self._wait_again(queued, moves_in_s, held, now_s)
            queued.awaited = of_model.sets.get(hint.owner)
            queued.looks_again_at_s = now_s + min(moves_in_s or 0.0, _LOOKS_AGAIN_S)
        return None

    def _awaited_owner(
        self, queued: QueuedRequest, of_model: ModelInstances, now_s: float
    ) -> RoutingTarget | None:
        """Return the owner for which a request waits, if it need not choose again yet."""
        owner, again_in_s = queued.awaited, queued.looks_again_at_s - now_s
        if owner is None or again_in_s <= 0:
            return None
        if self.queue.count <= _FEW_WAIT and len(of_model.answering) <= _FEW_INSTANCES:
            return None
        if owner.has_free_slot or owner.is_silent or not owner.in_service:
            return None
        self.recheck_in_s = min(self.recheck_in_s, again_in_s)
        return owner

    def _instances_to_leave(
        self, queued: QueuedRequest, of_model: ModelInstances, now_s: float
    ) -> Mapping[str, float] | None:
        """Return the instances that a batch request must leave, and how long; None: all.

        A batch request that is served while interactive requests wait may take any slot.
        """
        left_s = self._interactive_ended_at_s + _LEFT_S - now_s
        if left_s <= 0 or self.queue.waiting("interactive"):
            return _NONE
        self.recheck_in_s = min(self.recheck_in_s, left_s)
        sets = of_model.sets
        own_free = sets.free_slots(sets.all & ~sets.spare)
        if own_free > min(queued.request.slots, of_model.own_slots - 1):
            return _NONE
        if not sets.free & sets.spare:
            return None
        return {instance.upstream.name: left_s for instance in of_model.own}

    def _held_instances(
        self,
        queued: QueuedRequest,
        of_model: ModelInstances,
        left: Mapping[str, float],
        hint: CacheHint,
        now_s: float,
    ) -> Mapping[str, float]:
        """Return the instances that a request may not take now, and how long.

        It must leave them, their slots are held for others, another prompt comes first, or they
        compute its beginning.
        """
        request, pure, held = queued.request, of_model.pure, dict(left)
        if self.queue.is_full(request.priority):
            return left
        if self.holds.active:
            held |= self._held_for_agents(queued, of_model, hint, now_s)
        if (prompt := request.prompt) is None:
            return held
        for instance in of_model.with_files:
            if instance.leases and (wait_s := self._alike_wait_s(instance, prompt, now_s)) > 0:
                held[instance.upstream.name] = wait_s
        held |= self._held_for_beginning(queued, prompt, of_model, now_s)
        for instance in pure and [busy for busy in pure if busy in of_model.answering]:
            waited_s, timeout_s = now_s - queued.joined_at_s, queued.request.queue_timeout_s
            new_tokens = prompt.tokens - hint.cached_tokens(instance.bit)
            work = instance.prefilling, instance.decoding
            wait_s = prefill_wait_s(*work, new_tokens, waited_s, timeout_s)
            if wait_s:
                held[instance.upstream.name] = wait_s
        return held

    def _held_for_agents(
        self, queued: QueuedRequest, of_model: ModelInstances, hint: CacheHint, now_s: float
    ) -> Mapping[str, float]:
        """Return the instances whose free slots are held for next turns."""
        if queued.turn_s is None:
            before = self.queue.position(queued, now_s) - 1
            queued.turn_s = self.times.wait_s(before - 1, of_model.slots)
            leases = (lease for instance in of_model.answering for lease in instance.leases)
            if any(lease.request.may_yield for lease in leases):
                queued.turn_s = max(queued.turn_s, _YIELDS_S)
        waited_s = 0.0 if queued.held_since_s is None else now_s - queued.held_since_s
        held = self.holds.withheld(
            queued.request,
            hint,
            waited_s,
            queued.turn_s,
            now_s,
            is_alone=not self.queue.has_agents_beside(queued),
        )
        queued.withheld = held
        return held

    def _alike_wait_s(self, instance: RoutingTarget, prompt: Prompt, now_s: float) -> float:
        """Return how long a wait for a prompt with the same beginning pays; 0 or less: not."""
        if len(prompt.blocks) < _BLOCKS_MIN:
            return 0.0
        begun = (
            (shared_blocks(other.blocks, prompt.blocks), lease)
            for lease in instance.leases
            if not lease.is_ending and (other := lease.request.prompt)
        )
        shared, first = max(begun, key=itemgetter(0), default=(0, None))
        if first is None or shared < _BLOCKS_MIN:
            return 0.0
        more = shared - self.prefix_index.available_blocks(instance.upstream, prompt)
        gain_s = more * BLOCK_TOKENS / instance.rates.prefill_tps
        if more < _BLOCKS_MIN or self.times.decode_s > gain_s:
            return 0.0
        prompts = instance.prefilling + 1
        expected_s = prompts * prompt.tokens / instance.rates.prefill_tps + self.times.decode_s
        return _PATIENCE * expected_s - (now_s - first.began_at_s)

    def _held_for_beginning(
        self, queued: QueuedRequest, prompt: Prompt, of_model: ModelInstances, now_s: float
    ) -> Mapping[str, float]:
        """Return the instances that a request leaves while another computes its beginning."""
        if (first := _computing(of_model, prompt)) is None:
            return _NONE
        waits = (
            (instance.upstream.name, self._beginning_wait_s(instance, first, queued, now_s))
            for instance in of_model.with_files
        )
        held = {name: wait_s for name, wait_s in waits if wait_s > 0}
        if held and queued.beginning_since_s is None:
            queued.beginning_since_s = now_s
        return held

    def _beginning_wait_s(
        self, instance: RoutingTarget, first: Lease, queued: QueuedRequest, now_s: float
    ) -> float:
        """Return how long a request waits for the beginning that `first` computes and saves."""
        prompt, its, upstream = queued.request.prompt, first.request.prompt, first.upstream
        if prompt is None or its is None or instance.upstream.cache_key != upstream.cache_key:
            return 0.0
        shared = _shared_beginning(first, prompt)
        more = shared - self._available_blocks(instance.upstream, prompt)
        if more < _BLOCKS_MIN:
            return 0.0
        if first.beginning_saved_at_s is not None:
            return first.beginning_saved_at_s + _STORED_S - now_s
        progress, there_tps = first.progress, first.instance.rates.prefill_tps
        computed = progress.prompt_done - progress.cached
        if computed >= FEW_TOKENS:
            there_tps = computed / max(_LOOK_MIN_S, now_s - first.began_at_s)
        block_tokens = BLOCK_TOKENS * progress.prompt_total / its.tokens
        measures = self.prefix_index.measures[upstream.model]
        size_bytes = shared * block_tokens * upstream.token_bytes + upstream.state_bytes
        return beginning_wait_s(
            BeginningCase(
                left=max(0.0, shared * block_tokens - progress.prompt_done),
                there_tps=there_tps,
                tokens=more * block_tokens,
                here_tps=instance.rates.prefill_tps if instance.rates.answers else there_tps,
                backlog=instance.backlog_tokens,
                transfer_s=measures.transfer_s(size_bytes),
                waited_s=now_s - queued.joined_at_s,
                timeout_s=queued.request.queue_timeout_s,
            )
        )

    def _beginning_to_save(self, lease: Lease, of_model: ModelInstances) -> int:
        """Return the blocks of a prompt to compute first and to save for other instances."""
        request, prompt, instance = lease.request, lease.request.prompt, lease.instance
        if prompt is None or not of_model.with_files or request.is_background:
            return 0
        upstream, is_branch = instance.upstream, request.is_branch
        blocks = len(prompt.blocks) if is_branch else prompt.beginning_blocks
        if blocks < BEGINNING_BLOCKS_MIN or blocks * BLOCK_TOKENS <= upstream.window_tokens:
            return 0
        is_all_or_nothing = upstream.is_all_or_nothing
        beginning = lease.beginning if is_all_or_nothing else prompt.blocks[blocks - 1]
        reuse_p = 1.0 if is_branch else self._beginnings.note(beginning)
        others = (other for other in of_model.with_files if other is not instance)
        is_single = not any(other.upstream.cache_key == upstream.cache_key for other in others)
        # The other slots of an engine need the file of a branch, or of a state, too.
        is_single = is_single and not (upstream.slots > 1 and (is_branch or is_all_or_nothing))
        is_cut = request.kind in _CHATS and request.slots == 1
        if is_single or not (is_cut and upstream.saves_beginnings):
            return 0
        if instance.prefilling > 1:  # its engine computes prompts in the order of their arrival
            return 0
        missing = blocks - self._available_blocks(upstream, prompt)
        if is_branch:  # a slot here is of no use to the other branches: only files count
            missing = blocks - self.prefix_index.saved_blocks(upstream, prompt)
        measures, rates = self.prefix_index.measures[upstream.model], instance.rates
        tokens = blocks * BLOCK_TOKENS
        size_bytes = tokens * upstream.token_bytes + upstream.state_bytes
        case = SaveCase(
            tokens=missing * BLOCK_TOKENS,
            prefill_tps=rates.prefill_tps,
            save_s=measures.saves.duration_s(size_bytes),
            restore_s=measures.restores.duration_s(size_bytes),
            return_p=reuse_p,
            loss_p=1.0,
            streams=instance.decoding,
            gap_s=1 / rates.decode_tps,
        )
        is_worth = is_worth_saving(case, self.queue.settings.slot_save_pause_max_ms / 1000)
        return blocks if missing >= BEGINNING_BLOCKS_MIN and is_worth else 0

    def _available_blocks(self, upstream: Upstream, prompt: Prompt) -> int:
        """Return the blocks of a beginning that an instance surely need not compute."""
        index = self.prefix_index
        find = index.saved_blocks if upstream.is_all_or_nothing else index.available_blocks
        return find(upstream, prompt)

    def _wait_again(
        self,
        queued: QueuedRequest,
        moves_in_s: float | None,
        held: Mapping[str, float],
        now_s: float,
    ) -> None:
        """Note that a request takes no slot now, although one is free."""
        moves_in_s = math.inf if moves_in_s is None else moves_in_s
        self.recheck_in_s = min(self.recheck_in_s, moves_in_s, *held.values())
        if queued.withheld and not queued.request.is_background:
            self.holds.note_withheld(queued.withheld, now_s)
            if queued.held_since_s is None:
                queued.held_since_s = now_s

    def _candidates(self, of_model: ModelInstances) -> Candidates:
        owners, policy = self.prefix_index.owners(self.queue.model), self.queue.settings.policy
        waiting: Mapping[str, int] = self.queue.by_owner if self.queue.count > _FEW_WAIT else {}
        times, trial_share = self.times, of_model.trial_share
        return Candidates(of_model.sets, owners, policy, times, trial_share, waiting)

    def _lease(
        self, queued: QueuedRequest, instance: RoutingTarget, hint: CacheHint | None, now_s: float
    ) -> Lease:
        """Lease a slot; `hint`: the cached part of the prompt, None if not looked up yet."""
        request, prompt = queued.request, queued.request.prompt
        on_first_token = self._on_first_token if instance.upstream.prefer_pure_decode else None
        lease = Lease(request, instance, self.clock, on_first_token=on_first_token)
        lease.queued_s = now_s - queued.joined_at_s
        lease.yielded = queued.yielded
        lease.position = queued.position
        if prompt:
            hint = hint or self.prefix_index.look_up(prompt, queued.session)
            lease.expected_cached = most_tokens(hint.held, instance.bit)
            lease.is_continued = hint.conversation is not None
            name = instance.upstream.name
            lease.holder = self.prefix_index.holder(hint, name, self._is_serving)
            lease.has_awaited_owner = queued.awaited is not None
            if queued.beginning_since_s is not None:
                lease.beginning_wait_s = now_s - queued.beginning_since_s
            conversation = self.prefix_index.assign(instance.upstream, prompt, queued.session, hint)
            lease.conversation, lease.conversation_number = conversation, conversation.number
            conversation.is_paused = False
        if request.slots > 1:
            lease.beside = tuple(
                Lease(request, instance, self.clock, first=lease)
                for _ in range(instance.slots_needed(request) - 1)
            )
        if request.may_yield and instance.upstream.node is None:
            lease.place = max(0.0, queued.tag), queued.number
        instance.hold((lease, *lease.beside))
        if self.holds.expected:
            self.holds.note_lease(lease, queued.joined_at_s)
        if queued.held_since_s is not None:
            lease.hold_wait_s = now_s - queued.held_since_s
        lease.sequences = len(instance.leases)
        queued.lease = lease
        return lease

    def _is_serving(self, name: str) -> bool:
        return self.instances.of_model(self.queue.model).sets.get(name) is not None

    def _count_turn(self, instance: RoutingTarget, weight: float) -> None:
        # A model that was busy or new has missed turns, and does not get them all now.
        self._turn = max(self._turn, instance.turn)
        instance.set_turn(self._turn + 1 / weight)


def _computing(of_model: ModelInstances, prompt: Prompt) -> Lease | None:
    """Return the request that computes and saves most of a prompt's beginning, if any does."""
    found = (
        (_shared_beginning(lease, prompt), lease)
        for instance in of_model.with_files
        for lease in instance.leases
        if lease.beginning_blocks and not lease.is_ending
    )
    shared, first = max(found, key=itemgetter(0), default=(0, None))
    return first if shared >= _BLOCKS_MIN else None


def _shared_beginning(first: Lease, prompt: Prompt) -> int:
    its, is_whole = first.request.prompt, first.upstream.is_all_or_nothing
    if its is None or (is_whole and first.beginning not in prompt.shared_hashes):
        return 0
    return min(first.beginning_blocks, shared_blocks(its.blocks, prompt.blocks))
