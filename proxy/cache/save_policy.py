"""Saving slots to files and restoring them: the storage, its counters, and whether a save pays.

Also whether it pays to compute a conversation's next turn before it comes, and to hold its slot
until then.

A save pays if recomputing the prompt takes twice as long as the engine's pause for the save.
Streams wait for either, so their number does not count. The prompt counts by the probability that
its conversation returns and that its cache is lost until then.

While streams decode, a save is allowed only if its expected pause is below a limit. A stream sees
it as one long gap between two tokens. If fewer than one gap in a hundred is that long, the 99th
percentile stays the same; the same holds for any number of pauses that are short compared to a gap.
A slot that is taken next is saved regardless of the frequency: the prompt that takes it interrupts
the streams as well.

A request that begins during a save waits for its end, 4 s for 4 GiB at 1 GB/s. So an idle engine
saves only after a pause in which the next request has become improbable enough.

The durations of transfers, the losses of caches and the returns are measured. A conversation counts
as returned as soon as it returns. Until then it counts as gone by a share that grows with the time
since its last turn: half after the usual time between turns, and all in the end. So recently ended
turns make no conversation look lost, and a model whose conversations have one turn each is
recognised after a few of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.common.least_squares import LeastSquares
from proxy.upstream.upstream import average


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tokens and bytes that an engine wrote or read, and how long that blocked it."""

    tokens: int
    size_bytes: int
    duration_s: float


class SlotFileStorage(Protocol):
    """The slot store. Its methods log failures of engines and disks instead of raising."""

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        """Return whether the limits of disk space and of writes per hour allow this save now."""

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        """Have an engine write an idle slot; return its transfer, None if that failed.

        The file is verified and stored after that; then `Router.add_slot_file` is called with it,
        and `Router.remove_slot_files` with the files that it replaces. It is dropped unless the
        engine wrote `tokens` tokens or up to 2 fewer.
        """

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        """Fill an idle slot from a file, which is verified first; None if that failed.

        A file that is missing, altered or refused is removed from the router before this returns.
        """

    async def look(self, instance: str, /) -> None:
        """Tell the router of files that other daemons have stored; returns within 0.25 s."""


Operation = Literal["save", "restore"]


@dataclass(slots=True)
class OperationCounts:
    """Operations since the start; `failures` are those without a transfer."""

    done: int = 0
    failures: int = 0
    tokens: int = 0
    size_bytes: int = 0
    duration_s: float = 0.0

    def note(self, transfer: Transfer | None) -> None:
        if transfer is None:
            self.failures += 1
            return
        self.done += 1
        self.tokens += transfer.tokens
        self.size_bytes += transfer.size_bytes
        self.duration_s += transfer.duration_s


ModelCounts = Mapping[Operation, OperationCounts]


def no_counts() -> ModelCounts:
    return {"save": OperationCounts(), "restore": OperationCounts()}


class CountedStorage:
    """The storages of all instances; counts their operations by model."""

    def __init__(self) -> None:
        self._storages: dict[str, tuple[str, SlotFileStorage]] = {}  # by instance, with its model
        self.counts: dict[str, ModelCounts] = {}  # By model; those without operations are missing.

    def add(self, instance: str, model: str, storage: SlotFileStorage) -> None:
        self._storages[instance] = model, storage

    def forget(self, instance: str) -> None:
        self._storages.pop(instance, None)

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        _, storage = self._storages.get(instance, ("", None))
        return storage is not None and storage.may_save(instance, size_bytes)

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        if (found := self._storages.get(instance)) is None:
            return None
        model, storage = found
        return self._note("save", model, await storage.save(instance, id_slot, tokens, fingerprint))

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        if (found := self._storages.get(instance)) is None:
            return None
        model, storage = found
        return self._note("restore", model, await storage.restore(instance, id_slot, name))

    async def look(self, instance: str, /) -> None:
        if found := self._storages.get(instance):
            await found[1].look(instance)

    def _note(self, operation: Operation, model: str, transfer: Transfer | None) -> Transfer | None:
        self.counts.setdefault(model, no_counts())[operation].note(transfer)
        return transfer


# Assumed before the first transfer: 10 ms and 1 GB/s. SmolLM2-135M, build 10434, 2 cores: 24 MB
# saved in 10 to 20 ms, restored in 8 ms.
_FIXED_S: Final = 0.01
_BYTE_S: Final = 1e-9
# Scale of each regressor: this many bytes take about as long as the fixed part of a transfer.
_SCALES: Final = (1.0, 10e6)


class TransferRates:
    """Transfer durations of one model in one direction: to or from its files."""

    def __init__(self) -> None:
        self._seconds = LeastSquares(_SCALES, (_FIXED_S, _BYTE_S))

    def note(self, transfer: Transfer) -> None:
        if transfer.duration_s > 0:
            self._seconds.add((1.0, transfer.size_bytes), transfer.duration_s)

    def duration_s(self, size_bytes: float) -> float:
        return self._seconds.value((1.0, size_bytes))


# Assumed before the first return: half of the conversations return, after half a minute.
_PRIOR: Final = 0.5
_PRIOR_SAMPLES: Final = 2.0
_RETURN_S: Final = 30.0
# Shorter pauses are those of programs; people return later.
_RETURN_MIN_S: Final = 5.0
# Older returns count less: about the latest sixty count.
_KEPT: Final = 0.984
# Minimum, because a conversation may still return after any time.
_LEAST: Final = 0.02
# Conversations with fewer turns than this are counted separately by number of turns.
_TURNS_MAX: Final = 4
_WAITING_MAX: Final = 512
# Waiting conversations are counted at most once per this time.
_COUNTED_S: Final = 0.25


# A conversation since its last turn: its turns, its tokens, when the turn ended.
_Waiting = tuple[int, int, float]


class ReturnRates:
    """Return probabilities of one model's conversations; remembers at most 512 conversations."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._tallies = [(0.0, 0.0)] * _TURNS_MAX  # returned, gone
        self._log_return_s = math.log(_RETURN_S)
        self._shares: list[float] = []
        self._counted_at_s = -math.inf

    @property
    def return_s(self) -> float:
        """The usual time from the end of a turn to the next one."""
        return math.exp(self._log_return_s)

    def note_turn(
        self, conversation: int, began_at_s: float, ended_at_s: float, tokens: int
    ) -> int | None:
        """Note that a turn has ended, with the conversation's tokens now.

        Returns its tokens after the turn before, None if unknown.
        """
        before = self._waiting.pop(conversation, None)
        turns, tokens_before = 0, None
        if before:
            turns, tokens_before, before_s = before
            pause_s = max(_RETURN_MIN_S, began_at_s - before_s)
            self._log_return_s = average(self._log_return_s, math.log(pause_s))
            self._tally(turns, returned=1.0)
        self._waiting[conversation] = turns + 1, tokens, ended_at_s
        if len(self._waiting) > _WAITING_MAX:
            _, (oldest_turns, *_) = self._waiting.popitem(last=False)
            self._tally(oldest_turns, gone=1.0)
        return tokens_before

    def return_p(self, conversation: int, now_s: float) -> float:
        """Return the probability that a conversation returns after its last turn."""
        if now_s - self._counted_at_s >= _COUNTED_S or not self._shares:
            self._count(now_s)
        waiting = self._waiting.get(conversation)
        if waiting is None:
            return max(_LEAST, self._shares[0])
        turns, _, ended_at_s = waiting
        share = self._shares[_group(turns)]
        late = 1 - self._elapsed_share(ended_at_s, now_s)
        return max(_LEAST, share * late / (1 - share * (1 - late)))

    def _elapsed_share(self, ended_at_s: float, now_s: float) -> float:
        """Return the share of returning conversations that would have returned by now.

        Uses a log-logistic distribution: some return ten times later than usual.
        """
        since_s = max(0.0, now_s - ended_at_s)
        return since_s / (since_s + self.return_s)

    def _tally(self, turns: int, *, returned: float = 0.0, gone: float = 0.0) -> None:
        before_returned, before_gone = self._tallies[_group(turns)]
        now = _KEPT * before_returned + returned, _KEPT * before_gone + gone
        self._tallies[_group(turns)] = now

    def _count(self, now_s: float) -> None:
        gone = [gone for _, gone in self._tallies]
        for turns, _, ended_at_s in self._waiting.values():
            gone[_group(turns)] += self._elapsed_share(ended_at_s, now_s)
        returned = [returned for returned, _ in self._tallies]
        prior = _share(sum(returned), sum(gone), _PRIOR)
        self._shares = [_share(*both, prior) for both in zip(returned, gone, strict=True)]
        self._counted_at_s = now_s


def _group(turns: int) -> int:
    return min(turns, _TURNS_MAX) - 1


def _share(returned: float, gone: float, prior: float) -> float:
    return (returned + _PRIOR_SAMPLES * prior) / (returned + gone + _PRIOR_SAMPLES)


# Ends of the intervals in which a client returns with the results of tools: 0.2 to 58 s.
PAUSE_ENDS_S: Final = tuple(0.2 * 1.5**step for step in range(15))
# Assumed before the first return: four of five return, half of these within this time.
_PAUSE_RETURNED: Final = 0.8
_PAUSE_S: Final = 2.0
# The weight, in returns, of assumptions and of the client's other tools.
_PAUSE_SAMPLES: Final = 2.0
# Older returns count less: about the latest thirty count.
_PAUSE_KEPT: Final = 0.97
_PAUSES_MAX: Final = 512


class ToolPauses:
    """How long one model's clients take to return with the results of tools.

    Each tool of each client has its own shares of returns by time, which begin as those of all its
    tools, which begin as those of all clients. Remembers at most 512 of them, by hash.
    `ReturnRates` instead counts all conversations, and pauses from five seconds on.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[int, list[float]] = OrderedDict()

    def note(self, client: str, tools: Sequence[str], pause_s: float) -> None:
        at = bisect_left(PAUSE_ENDS_S, pause_s)  # the last interval: as good as never
        for key in _pause_keys(client, tools):
            counts = self._counts.pop(key, None) or [0.0] * (len(PAUSE_ENDS_S) + 1)
            self._counts[key] = counts = [_PAUSE_KEPT * count for count in counts]
            counts[at] += 1
        while len(self._counts) > _PAUSES_MAX:
            self._counts.popitem(last=False)

    def shares(self, client: str, tools: Sequence[str]) -> list[float]:
        """Return the probabilities that a client has returned by each of `PAUSE_ENDS_S`."""
        by_end = [_PAUSE_RETURNED * end_s / (end_s + _PAUSE_S) for end_s in PAUSE_ENDS_S]
        for key in _pause_keys(client, tools):
            if counts := self._counts.get(key):
                weight, returned = sum(counts) + _PAUSE_SAMPLES, 0.0
                for at, assumed in enumerate(by_end):
                    returned += counts[at]
                    by_end[at] = (returned + _PAUSE_SAMPLES * assumed) / weight
        return by_end


def _pause_keys(client: str, tools: Sequence[str]) -> tuple[int, int, int]:
    return hash(()), hash((client,)), hash((client, *sorted(set(tools))))


# Assumed loss before the first return, and its minimum, because a process may end.
_LOSS: Final = 0.5
_LEAST_LOSS: Final = 0.05
# Minimum, so that restores are still tried for long prompts.
_LEAST_USE: Final = 0.02


class SlotFileMeasures:
    """Measured costs and benefits of slot files, for one model on this machine."""

    def __init__(self) -> None:
        self.saves = TransferRates()
        self.restores = TransferRates()
        self.returns = ReturnRates()
        self.tool_pauses = ToolPauses()
        self._loss = _LOSS
        self._use = 1.0

    def transfer_s(self, size_bytes: float) -> float:
        """Return how long another instance waits for a file: saved, stored and restored.

        It is stored while the engine goes on, in about the time that the engine took to save it.
        """
        return 2 * self.saves.duration_s(size_bytes) + self.restores.duration_s(size_bytes)

    def note_use(self, restored: int, found: int) -> None:
        """Note how many tokens of a prompt were restored into a slot and how many the engine found.

        A recurrent model finds none if its template leaves out the reasoning of earlier answers.
        """
        if restored > 0:
            self._use = average(self._use, min(1.0, found / restored))

    def note_turn(
        self, conversation: int, began_at_s: float, ended_at_s: float, tokens: int, found: int
    ) -> None:
        """Note that a turn has ended; times are monotonic.

        `tokens` are those of the conversation now; `found` is how many of them were in a slot or in
        the host cache, 0 if restored from a file.
        """
        before = self.returns.note_turn(conversation, began_at_s, ended_at_s, tokens)
        if before:
            self._loss = average(self._loss, 1 - min(1.0, found / before))

    @property
    def use(self) -> float:
        return max(_LEAST_USE, self._use)

    @property
    def loss_p(self) -> float:
        """Expected fraction of a returning conversation that is in no slot or host cache."""
        return max(_LEAST_LOSS, self._loss)


# An unused share of time accumulates for this long.
_SAVED_S: Final = 300.0
# Estimates are wrong by up to a factor of two, and disk time has a cost too.
_MARGIN: Final = 2.0
# The most that the save of an idle engine may delay the next turn, on average.
_TURN_WAIT_S: Final = 0.2
# A client that continues at once does so within this time.
IDLE_S: Final = 0.25
# Below this, recomputing is as fast as finding the tokens.
_WORTH_TOKENS: Final = 32
# Tokens that a stream decodes between two pauses.
_TOKENS_BETWEEN: Final = 150
# A pause below this share of the gap between two tokens is not noticed.
_SHORT_PAUSE: Final = 0.25


@dataclass(frozen=True, slots=True)
class SaveCase:
    """The expected cost and benefit of saving one slot."""

    tokens: int  # Tokens of its conversation that are in no file.
    prefill_tps: float  # Prompt tokens that the engine computes per second, above 0.
    save_s: float  # Time for which the engine computes nothing else.
    restore_s: float  # The same when the slot is restored.
    return_p: float  # Probability that the conversation returns and continues from its file.
    loss_p: float  # Probability that neither a slot nor the host cache holds it then.
    streams: int = 0
    gap_s: float = 0.0  # Time between two tokens of such a stream.
    decoded: float = 0.0  # Tokens that the stream decoded since the last save.
    waiting: int = 0  # Requests that are not sent yet; the save is for one of them.
    usual_return_s: float = _RETURN_S  # From the end of a turn to the next one.

    @property
    def saving_s(self) -> float:
        """Expected engine time that a file saves; the slot with the most is saved first."""
        computed_s = self.tokens / self.prefill_tps
        return self.return_p * self.loss_p * max(0.0, computed_s - self.restore_s)

    @property
    def cost_s(self) -> float:
        """Time of the save, and of the requests that miss a pass of the engine because of it.

        A busy engine saves between two passes, and a request that waits for that misses the next.
        Of requests that wait for an idle engine, the first one makes it busy for the others.
        """
        missing = self.waiting if self.streams else max(0, self.waiting - 1)
        return self.save_s + missing * self.gap_s


def is_worth_saving(case: SaveCase, pause_max_s: float) -> bool:
    """Return whether a save gains more than it costs; `pause_max_s` applies to streams.

    Streams wait for a save as they would wait for the prompt that it makes unnecessary, so their
    number does not count.
    """
    if case.tokens < _WORTH_TOKENS or case.saving_s <= _MARGIN * case.cost_s:
        return False
    return not case.streams or case.save_s <= pause_max_s


def is_worth_copying(tokens: int, return_p: float) -> bool:
    """Return whether to make the engine copy a slot to its host cache before a file overwrites it.

    `tokens` are in no file. A copy takes about as long as the engine needs for a few tokens.
    """
    return return_p * tokens >= _WORTH_TOKENS


def idle_before_save_s(case: SaveCase) -> float:
    """Return how long an engine must have been idle when a save begins.

    After `t` idle seconds the next turn comes within a second with a probability of about
    `1 / (t + usual_return_s)` (see `ReturnRates`). A turn that comes during the save waits for half
    of it on average. The expected wait is at most `_TURN_WAIT_S`.
    """
    wanted_s = case.save_s**2 / (2 * _TURN_WAIT_S) - case.usual_return_s
    return max(IDLE_S, wanted_s)


def due_in_s(case: SaveCase) -> float:
    """Return the time until the streams may be paused again, 0 for now."""
    is_short = case.save_s <= _SHORT_PAUSE * case.gap_s
    if is_short or not case.streams:
        return 0.0
    return max(0.0, _TOKENS_BETWEEN - case.decoded) * case.gap_s


@dataclass(frozen=True, slots=True)
class NextTurnCase:
    """One conversation whose next turn could be computed before it comes."""

    tokens: int  # Tokens that would be computed ahead.
    # Tokens of these that the next turn finds even so: those before a checkpoint of the engine.
    found_tokens: int
    return_p: float  # Probability that the conversation returns.
    loss_p: float  # Probability that neither a slot nor the host cache holds it then.
    # Probability that the next turn continues all that the slot holds without any work.
    kept_p: float


# Tokens computed ahead for each token that a client then need not wait for.
_AHEAD_COST_MAX: Final = 10.0


def pays_to_compute_ahead(case: NextTurnCase) -> bool:
    """Return whether clients gain a tenth of the idle time that computing ahead takes."""
    lost = case.tokens - (1 - case.loss_p) * case.found_tokens
    gained = case.return_p * (1 - case.kept_p) * lost
    return lost >= _WORTH_TOKENS and gained * _AHEAD_COST_MAX >= case.tokens - case.found_tokens


# Where a conversation is computed or restored sooner, holds gain a few percent at best.
_LOST_MIN_S: Final = 0.5


def handover_s(lost_s: float, slots: int) -> float:
    """Return the cost of handing over a slot whose conversation returns, in slot seconds.

    That the conversation then waits for another slot is no cost: others do not wait meanwhile.

    Args:
        lost_s: The time to compute or restore the conversation.
        slots: Slots of the engine in use, with this one: it computes one prompt after the other.
    """
    return slots * lost_s if lost_s >= _LOST_MIN_S else 0.0


def best_hold(
    shares: Sequence[float], idle_s: float, limit_s: float, cost_s: float
) -> tuple[float, float]:
    """Return how long to hold a slot from now while requests wait, and the gain.

    Both are 0 if it gains more to hand the slot over. The gain is in slot seconds: a hold until a
    time gains `cost_s` if the conversation returns by then, and costs the time until it returns, or
    until then. Both delay the waiting requests alike. The best end is taken.

    Args:
        shares: Of returns by each of `PAUSE_ENDS_S`, see `ToolPauses`.
        idle_s: Since the answer that called the tools.
        limit_s: The longest hold, from that answer.
        cost_s: Cost of handing over, see `handover_s`.
    """
    held_s = gained_s = lost_s = 0.0
    at_s, now = idle_s, _returned(shares, idle_s)
    ends_s = [end_s for end_s in PAUSE_ENDS_S if idle_s < end_s < limit_s]
    before = now
    for end_s in (*ends_s, limit_s) if limit_s > idle_s and now < 1 else ():
        returned = _returned(shares, end_s)
        lost_s += (end_s - at_s) * (1 - (before + returned) / 2)
        gain_s = ((returned - now) * cost_s - lost_s) / (1 - now)
        if gain_s > gained_s:
            held_s, gained_s = end_s - idle_s, gain_s
        at_s, before = end_s, returned
    return held_s, gained_s


def _returned(shares: Sequence[float], by_s: float) -> float:
    """Return the share of returns by a time; between two ends it grows evenly."""
    at = bisect_left(PAUSE_ENDS_S, by_s)
    if at == len(PAUSE_ENDS_S):
        return shares[-1]
    begin_s, before = (PAUSE_ENDS_S[at - 1], shares[at - 1]) if at else (0.0, 0.0)
    within = (by_s - begin_s) / (PAUSE_ENDS_S[at] - begin_s)
    return before + within * (shares[at] - before)


class IdleBudget:
    """Seconds that an engine may compute without a request: a share of the last 5 minutes."""

    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._left_s = self._most_s = share * _SAVED_S
        self._at_s = now_s

    def allows(self, duration_s: float, now_s: float) -> bool:
        """Return whether work may begin; work longer than the whole allowance needs all of it."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._left_s = min(self._most_s, self._left_s + self._share * passed_s)
        return self._share > 0 and self._left_s >= min(duration_s, self._most_s)

    def spend(self, duration_s: float) -> None:
        self._left_s -= duration_s


def pays_to_restore(more_tokens: int, cost_tokens: int) -> bool:
    """Return whether to restore a slot from a file rather than use the caches' content.

    Args:
        more_tokens: Tokens of the prompt in the file but probably not in the caches.
        cost_tokens: Tokens that the engine computes in the time of reading the file. Its streams
            wait no longer for the file than for the prompt.
    """
    return more_tokens >= _WORTH_TOKENS and more_tokens > _MARGIN * cost_tokens
