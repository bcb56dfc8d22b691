"""The routing policies: which instance takes a request. Pure.

`affinity`, the default:

1. A conversation goes to its owner, if the owner's cache holds at least 64 of its tokens. It moves
   if the owner has no free slot, another instance has one, and waiting takes longer than the answer
   there: the prompt's time plus a quarter, plus the time to refill the owner's cache as far as no
   slot file holds it. It also waits no longer than that, so a wrong estimate costs at most twice
   the move. It leaves an owner with a free slot only for a faster instance, by the same rule.
2. A new conversation goes to an instance that owns less than 1.25 times its share plus one (without
   the extra one, the first few related conversations would be separated): first the one with most
   of the prompt in its cache, then the one that owns the fewest conversations, then the least busy.
   A faster instance gets it in spite of a smaller cache if it answers in less than 4/5 of the time.

Shares, loads and turns are relative to the instances' weights (`Weight`).

Instances on trial serve some conversations, the others serve the rest (`on_trial`), and each
conversation stays on its side. Only a request that finds no slot there goes to the other side.

`least-busy` takes the instance with the fewest requests per slot, `round-robin` the next in turn. A
spare instance (by default, one on another machine) takes only requests that find no free slot
elsewhere; a conversation that it owns stays there. No request goes to an instance without a free
slot.

Weights share requests between instances of unequal speed, in inverse proportion to the latency per
token, like the layers of `corral balance`. An instance with too few measurements gets an average
share, so that it is measured. Below a threshold all weights are equal, because two engines on one
machine rarely measure the same. Every share is large enough for its instance to be measured again;
measurements from long before the model's latest response do not count.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from proxy.settings import Policy
from proxy.upstream.upstream import MEMORY_S, DecodeLatency

_IMBALANCE_THRESHOLD: Final = 2.0
# The smallest weight, relative to the fastest instance's.
_SMALLEST: Final = 1 / 16

WeightReason = Literal["measured", "set", "equal"]


@dataclass(frozen=True, slots=True)
class Weight:
    """An instance's share of requests as a multiple of an average one."""

    value: float = 1.0
    # `measured`, `set` in the settings, or `equal`: too few measurements, or too little difference.
    reason: WeightReason = "equal"


EQUAL: Final = Weight()


# An instance's measured latency, and its weight in the settings, or None.
Speed = tuple[DecodeLatency, float | None]


def weights_of(speeds: Sequence[Speed]) -> list[Weight]:
    """Return the weights of one model's instances; measured weights average 1."""
    measured = iter(_measured_weights([latency for latency, weight in speeds if weight is None]))
    return [next(measured) if weight is None else Weight(weight, "set") for _, weight in speeds]


def _measured_weights(latencies: Sequence[DecodeLatency]) -> list[Weight]:
    speeds = _relative_speeds(latencies)
    known = [speed for speed in speeds if speed is not None]
    if not known or max(known) <= _IMBALANCE_THRESHOLD * min(known):
        return [EQUAL] * len(latencies)
    mean, least = sum(known) / len(known), _SMALLEST * max(known)
    return [
        EQUAL if speed is None else Weight(max(speed, least) / mean, "measured") for speed in speeds
    ]


def _relative_speeds(latencies: Sequence[DecodeLatency]) -> list[float | None]:
    """Return speeds as multiples of one instance's; None if it cannot be compared."""
    since_s = max((latency.latest_s for latency in latencies), default=0.0) - MEMORY_S
    base = max(
        latencies, key=lambda latency: (latency.latest_s >= since_s, latency.samples), default=None
    )
    ratios = [base and latency.over(base, since_s) for latency in latencies]
    return [1 / ratio if ratio else None for ratio in ratios]


_SHARE: Final = 1.25
_SOONER: Final = 1.25
# Computing fewer tokens is as fast as finding them in a cache.
WORTH_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance as one request sees it."""

    name: str
    slots: int
    slots_in_use: int = 0
    turn: float = 0.0  # Its place in the order of use; the lowest is next.
    conversations: int = 0  # How many of the latest conversations it owns.
    cached_tokens: int = 0  # Tokens of this prompt expected in its cache.
    saved_tokens: int = 0  # The value of a slot file with this prompt, in tokens.
    backlog_tokens: int = 0  # Prompt tokens left to compute.
    prefill_tps: float = 500.0
    decode_s: float = 0.0  # Estimated seconds from the first to the last token of an answer.
    free_in_s: float = 0.0  # Estimated seconds until a slot is free; 0 if one is.
    is_spare: bool = False  # It takes only requests that find no free slot elsewhere.
    needed: int = 1  # Slots that the request would use.
    is_on_trial: bool = False  # It runs the profile on trial.
    weight: float = 1.0  # Its share of requests as a multiple of an average instance's.
    # Another prompt comes first, or its last slot is for interactive requests.
    is_held: bool = False

    @property
    def is_free(self) -> bool:
        return not self.is_held and self.slots_in_use + self.needed <= self.slots

    @property
    def load(self) -> float:
        return self.slots_in_use / self.slots / self.weight

    @property
    def has_useful_cache(self) -> bool:
        return self.cached_tokens >= WORTH_TOKENS

    def prefilled_in_s(self, tokens: int) -> float:
        """Return when a prompt of `tokens` would be computed, if a slot were free now."""
        new_tokens = max(0, tokens - self.cached_tokens)
        return (self.backlog_tokens + new_tokens) / self.prefill_tps

    def answered_in_s(self, tokens: int) -> float:
        """Return when the answer would be complete, if a slot were free now."""
        return self.prefilled_in_s(tokens) + self.decode_s


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for a request."""

    name: str | None  # The instance whose slot it takes; None: it waits.
    # Seconds until it leaves the owner for a slot that is free elsewhere; None if no slot is free.
    moves_in_s: float | None = None
    is_diverted: bool = False  # Whether its side of a trial had no slot for it.


def choose(  # noqa: PLR0913 (the facts of one request)
    policy: Policy,
    candidates: Sequence[Candidate],
    tokens: int,
    owner: str | None,
    waited_s: float,
    *,
    on_trial: bool = False,
    share: float | None = None,
) -> Choice:
    """Choose the instance for one request.

    Args:
        policy: The rule.
        candidates: The instances that may take it, or a part that contains all possible choices.
        tokens: Length of the prompt.
        owner: The instance that has its conversation, or None; only `affinity` uses it.
        waited_s: How long the request has waited.
        on_trial: Whether its conversation is part of a trial.
        share: `share_of` the peers of the preferred candidates; None: `candidates` has all peers.
    """
    free = [candidate for candidate in candidates if candidate.is_free]
    if not free:
        return Choice(None)
    free = [candidate for candidate in free if candidate.is_on_trial == on_trial] or free
    first = [candidate for candidate in free if not candidate.is_spare] or free
    if policy == "round-robin":
        return Choice(min(first, key=lambda candidate: candidate.turn).name)
    if policy == "least-busy":
        return Choice(min(first, key=lambda candidate: (candidate.load, candidate.turn)).name)
    if share is None:
        kind = first[0].is_spare, first[0].is_on_trial
        share = share_of(
            [
                candidate
                for candidate in candidates
                if (candidate.is_spare, candidate.is_on_trial) == kind
            ]
        )
    owning = next(
        (
            candidate
            for candidate in candidates
            if candidate.name == owner and candidate.has_useful_cache
        ),
        None,
    )
    if owning is None:
        return Choice(_for_new_conversation(first, share, tokens).name)
    if owning.is_free:
        return Choice(_stay_or_move(owning, first, share, tokens).name)
    return _move_or_wait(owning, free, tokens, waited_s)


def share_of(everyone: Sequence[Candidate]) -> float:
    """Return an equal share of the latest conversations for an instance of weight 1."""
    return sum(candidate.conversations for candidate in everyone) / sum(
        candidate.weight for candidate in everyone
    )


def conversations_max(share: float, weight: float) -> float:
    """Return the number of conversations from which an instance gets no further one."""
    return _SHARE * share * weight + 1


def _below_share(free: Sequence[Candidate], share: float) -> list[Candidate]:
    return [
        candidate
        for candidate in free
        if candidate.conversations < conversations_max(share, candidate.weight)
    ]


def _for_new_conversation(free: Sequence[Candidate], share: float, tokens: int) -> Candidate:
    allowed = _below_share(free, share) or free
    best = min(
        allowed,
        key=lambda candidate: (
            -(candidate.cached_tokens // WORTH_TOKENS),
            (candidate.conversations + 1) / candidate.weight,
            candidate.load,
            candidate.turn,
        ),
    )
    faster = [
        candidate
        for candidate in allowed
        if candidate.weight > best.weight and best.has_useful_cache
    ]
    other = min(faster, key=lambda candidate: candidate.answered_in_s(tokens), default=best)
    is_sooner = _SOONER * other.answered_in_s(tokens) < best.answered_in_s(tokens)
    return other if is_sooner else best


def _stay_or_move(
    owner: Candidate, free: Sequence[Candidate], share: float, tokens: int
) -> Candidate:
    faster = [
        candidate for candidate in _below_share(free, share) if candidate.weight > owner.weight
    ]
    best = min(faster, key=lambda candidate: candidate.answered_in_s(tokens), default=owner)
    return best if _worth_s(owner, best, tokens) < 0 else owner


def _move_or_wait(
    owner: Candidate, free: Sequence[Candidate], tokens: int, waited_s: float
) -> Choice:
    best = min(free, key=lambda candidate: (candidate.answered_in_s(tokens), candidate.turn))
    worth_s = _worth_s(owner, best, tokens)
    if owner.free_in_s > worth_s or waited_s >= worth_s:
        return Choice(best.name)
    return Choice(None, worth_s - waited_s)


def _worth_s(owner: Candidate, other: Candidate, tokens: int) -> float:
    """Return the longest wait for the owner that costs no more than a move to `other`."""
    refill_s = (owner.cached_tokens - owner.saved_tokens) / owner.prefill_tps
    there_s = _SOONER * other.prefilled_in_s(tokens) + other.decode_s
    return there_s + refill_s - owner.answered_in_s(tokens)
