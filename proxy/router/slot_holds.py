"""Holds the slot of a conversation that has called tools, until its next turn comes.

An agent's next turn comes in 0.3 to 30 s. If a waiting request took the slot meanwhile, the history
would be computed or restored again, and the engine's other slots would wait for that. So a slot is
held as long as that costs more than the idle slot (`best_hold`, by the times of the client's tool).
A hold is no lease: a request finds a free slot that it may not take yet. While no request waits, or
other slots are free, it has one effect: new conversations take other idle slots first.

A hold ends when the turn comes (`kept`), when its time is over (`expired`), when a waiting request
has waited long enough or has a higher priority (`yielded`), or when its instance leaves service or
the turn goes to another one (`ended`).

An interactive request waits for held slots as long as it would wait without holds: until the
requests before it in the queue had their turns. Then it gets the slot whose hold gains least; the
first in the queue takes it at once. While agents' turns wait as well, a history that is computed
again delays those and all behind them, so it also waits for half of the hold's gain; single
questions then get their slots sooner on average. The next turn of an agent that has called tools,
and a batch request, wait longer, so that handing over takes a sixth of the time at most, but not
half of their timeout. A turn that finds its slot held counts for its client in the fair queue as
any other.

A client that leaves during its answer has no hold. A closed connection after it says nothing: many
clients open one for each request.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Final, Literal

from proxy.cache.holders import Conversation
from proxy.cache.index import CacheHint, PrefixIndex
from proxy.cache.save_policy import PAUSE_ENDS_S, best_hold, handover_s
from proxy.request.request import ProxyRequest
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.settings import ProxySettings

HoldResult = Literal["kept", "expired", "yielded", "ended"]

# The longest further wait for held slots, as a multiple of the hold's gain: of agents' turns, and
# of single questions while agents' turns wait as well.
_AGENT_PATIENCE: Final = 5.0
_QUESTION_PATIENCE: Final = 0.5
# The longest wait for them, as a share of the request's timeout.
_TIMEOUT_SHARE: Final = 0.5
_CALLED_MAX: Final = 512


def hold_wait_s(
    turn_s: float, worth_s: float, timeout_s: float, *, is_patient: bool, is_alone: bool
) -> float:
    """Return how long a request waits for held slots at most.

    Args:
        turn_s: How long the requests before it would take without holds.
        worth_s: Gain of a hold, see `best_hold`.
        timeout_s: How long it may wait.
        is_patient: Whether it is an agent's next turn, or work that can wait.
        is_alone: Whether no agent's turn waits as well.
    """
    patience = _AGENT_PATIENCE if is_patient else 0.0 if is_alone else _QUESTION_PATIENCE
    return min(turn_s + patience * worth_s, _TIMEOUT_SHARE * timeout_s)


class SlotHold:
    """The slot of a conversation whose next turn is expected.

    Attributes:
        client: Whose conversation it is; with `priority` as its request.
        tools: Names of the tools that its answer called.
        tokens: In its slot.
        ended_at_s: When that answer ended.
        shares: See `ToolPauses.shares`.
        since_s: Since when a request waits for its slot; None: the hold has no effect.
    """

    def __init__(
        self, lease: Lease, conversation: Conversation, tools: Sequence[str], tokens: int
    ) -> None:
        self.conversation: Final = conversation
        self.instance: Final = lease.instance
        self.client: Final = lease.request.client
        self.priority: Final = lease.request.priority
        self.tools: Final = tools
        self.tokens: Final = tokens
        self.ended_at_s: Final = lease.clock()
        self.shares: Sequence[float] = ()
        self.is_over = False
        self.since_s: float | None = None


class SlotHolds:
    """The holds of one model.

    Attributes:
        expected: Conversations whose next turn is expected, the latest last; holds may be over.
        active: By instance; empty if there are none.
        counts: Holds that made a request wait, by how they ended.
        held_s: Their time.
    """

    def __init__(
        self, model: str, prefix_index: PrefixIndex, settings: ProxySettings, clock: Clock
    ) -> None:
        self.active: dict[RoutingTarget, list[SlotHold]] = {}
        self.counts: Counter[str] = Counter()
        self.held_s = 0.0
        self._prefix_index = prefix_index
        self._measures = prefix_index.measures[model]
        self._max_s = settings.slot_hold_max_s
        self._clock = clock
        self.expected: OrderedDict[Conversation, SlotHold] = OrderedDict()

    def begin(self, lease: Lease, tokens: int, tools: Sequence[str]) -> None:
        """Hold the slot of a lease whose answer has called tools; its slot has `tokens` tokens."""
        if not tools or lease.request.slots > 1:
            return
        conversation, now_s = lease.conversation, self._clock()
        while self.expected:
            oldest = next(iter(self.expected.values()))
            if oldest.ended_at_s > now_s - PAUSE_ENDS_S[-1] and len(self.expected) < _CALLED_MAX:
                break
            self._note_return(oldest, math.inf)
        may_hold = self._max_s and lease.slot and lease.instance.in_service
        if conversation is None or not may_hold:
            return
        self.expected[conversation] = hold = SlotHold(lease, conversation, tools, tokens)
        hold.shares = self._measures.tool_pauses.shares(hold.client, tools)
        self.active.setdefault(lease.instance, []).append(hold)
        self._prefix_index.slot_maps[lease.upstream.name].keep(conversation)

    def withheld(
        self,
        request: ProxyRequest,
        hint: CacheHint,
        waited_s: float,
        turn_s: float,
        now_s: float,
        *,
        is_alone: bool,
    ) -> dict[str, float]:
        """Return the instances whose free slots are held for others, with the time left of each.

        Args:
            request: Waits, or has just come.
            hint: The cached part of its prompt.
            waited_s: How long it has waited for held slots.
            turn_s: See `hold_wait_s`.
            now_s: The time.
            is_alone: See `hold_wait_s`.
        """
        is_patient = request.priority == "batch" or self._is_agent(request)
        found: dict[str, float] = {}
        cheapest: tuple[float, SlotHold] | None = None
        for instance in tuple(self.active):
            spare = instance.free - instance.slots_needed(request)
            kept = self._kept(instance, request, hint, now_s) if spare >= 0 else ()
            if len(kept) <= spare:
                continue
            worth_s, _, hold = min(kept, key=itemgetter(0))
            timeout_s = request.queue_timeout_s
            wait_s = hold_wait_s(
                turn_s, worth_s, timeout_s, is_patient=is_patient, is_alone=is_alone
            )
            patience_s = wait_s - waited_s
            found[instance.upstream.name] = min(patience_s, *(left_s for _, left_s, _ in kept))
            if patience_s <= 0 and (cheapest is None or worth_s < cheapest[0]):
                cheapest = worth_s, hold
        if cheapest:
            self._end(cheapest[1], "yielded")
            return self.withheld(request, hint, waited_s, turn_s, now_s, is_alone=is_alone)
        return found

    def note_withheld(self, names: Collection[str], now_s: float) -> None:
        """Note that a request waits because these instances' slots are held."""
        for instance, holds in self.active.items():
            for hold in holds if instance.upstream.name in names else ():
                if hold.since_s is None:
                    hold.since_s = now_s

    def note_lease(self, lease: Lease, joined_at_s: float) -> None:
        """Note that a request has got a slot; it joined the queue at `joined_at_s`."""
        if lease.conversation and (hold := self.expected.get(lease.conversation)):
            is_kept = hold.instance is lease.instance
            if is_kept and not hold.is_over and hold.since_s is not None:
                lease.held_s = lease.began_at_s - hold.since_s
            self._note_return(hold, joined_at_s - hold.ended_at_s, "kept" if is_kept else "ended")
        holds, now_s = self.active.get(lease.instance, ()), self._clock()
        too_many = max(0, len(holds) - lease.instance.free)
        for hold in sorted(holds, key=lambda hold: self._best(hold, now_s)[1])[:too_many]:
            self._end(hold, "yielded")

    def forget(self, instance: RoutingTarget) -> None:
        """End the holds of an instance that leaves service."""
        for hold in tuple(self.active.get(instance, ())):
            self._end(hold, "ended")

    def free_slots(self, instance: RoutingTarget) -> int:
        """Return the number of its free slots that are not held."""
        now_s = self._clock()
        held = (self._best(hold, now_s)[0] > 0 for hold in self.active.get(instance, ()))
        return instance.free - sum(held)

    def slots(self, instance: RoutingTarget) -> dict[int, float]:
        """Return the slots of an instance that are held while a request waits: seconds left."""
        if instance not in self.active:
            return {}
        slot_map, now_s = self._prefix_index.slot_maps[instance.upstream.name], self._clock()
        shown = (hold for hold in self.active[instance] if hold.since_s is not None)
        found = ((slot_map.find(hold.conversation), self._best(hold, now_s)[0]) for hold in shown)
        return {slot.id_slot: left_s for slot, left_s in found if slot}

    def slots_by_name(self) -> dict[str, float]:
        """Return all slots that are held while a request waits, as INSTANCE/SLOT: seconds left."""
        return {
            f"{instance.upstream.name}/{number}": left_s
            for instance in self.active
            for number, left_s in self.slots(instance).items()
        }

    def _is_agent(self, request: ProxyRequest) -> bool:
        """Return whether a request offers tools, and its client's agents are at work."""
        clients = (hold.client for hold in self.expected.values())
        return bool(request.json.get("tools")) and request.client in clients

    def _kept(
        self, instance: RoutingTarget, request: ProxyRequest, hint: CacheHint, now_s: float
    ) -> list[tuple[float, float, SlotHold]]:
        """Return the holds that a request respects, each with its gain and its time left."""
        kept = []
        for hold in tuple(self.active[instance]):
            left_s, worth_s = self._best(hold, now_s)
            is_urgent = (hold.priority, request.priority) == ("batch", "interactive")
            if left_s <= 0:
                self._end(hold, "expired")
            elif hold.conversation is not hint.conversation and not is_urgent:
                kept.append((worth_s, left_s, hold))
        return kept

    def _best(self, hold: SlotHold, now_s: float) -> tuple[float, float]:
        """Return the time left of a hold, and its gain."""
        return best_hold(hold.shares, now_s - hold.ended_at_s, self._max_s, self._cost_s(hold))

    def _cost_s(self, hold: SlotHold) -> float:
        """Return the cost of handing over, in slot seconds."""
        instance, upstream = hold.instance, hold.instance.upstream
        slot_map = self._prefix_index.slot_maps[upstream.name]
        slot, host_cache = slot_map.find(hold.conversation), slot_map.host_cache
        if slot is None:
            return 0.0
        lost_s, absent_p = hold.tokens / instance.rates.prefill_tps, 1.0
        if host_cache and host_cache.is_trusted:
            absent_p = host_cache.absence_probability(hold.tokens)
        if upstream.cache_key:
            size_bytes = hold.tokens * upstream.token_bytes + upstream.state_bytes
            save_s = 0 if slot.content.is_saved else self._measures.saves.duration_s(size_bytes)
            lost_s = min(lost_s, save_s + self._measures.restores.duration_s(size_bytes))
        return handover_s(absent_p * lost_s, 1 + len(instance.leases))

    def _note_return(self, hold: SlotHold, pause_s: float, result: HoldResult = "expired") -> None:
        self._measures.tool_pauses.note(hold.client, hold.tools, pause_s)
        del self.expected[hold.conversation]
        self._end(hold, result)

    def _end(self, hold: SlotHold, result: HoldResult) -> None:
        if hold.is_over:
            return
        hold.is_over = True
        holds = self.active[hold.instance]
        holds.remove(hold)
        if not holds:
            del self.active[hold.instance]
        if slot_map := self._prefix_index.slot_maps.get(hold.instance.upstream.name):
            slot_map.end_keep(hold.conversation)
        if hold.since_s is not None:
            self.counts[result] += 1
            self.held_s += self._clock() - hold.since_s
