"""Saving slots to files and filling slots from them: the storage, counted, and whether it pays.

A save pays when the prompt that would otherwise be computed again takes longer than the engine's
pause, which its request and each stream that decodes there wait for. The prompt counts by the
chance that its conversation returns and that its cache is lost until then.

The expected pause of a save is no longer than a limit while streams decode. A stream notices it as
one long gap between two tokens. Less than one such gap in a hundred leaves the 99th percentile as
it is; so do any number of pauses that are short beside a gap. A slot that is taken next is saved
regardless of how often: the prompt that takes it interrupts the streams as well.

Measured are the durations of transfers, what caches lost, and returns. Each conversation counts as
soon as it returns, and as one that does not by the time since it ended its turn: half after the
usual time from a turn to the next, all in the end. So what lately ended makes no conversation
unlikely, and if each has one turn that is known after a few of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.common.least_squares import LeastSquares
from proxy.upstream.timings import average


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an engine wrote or read, and how long it computed nothing else meanwhile."""

    tokens: int
    size_bytes: int
    duration_s: float


class SlotFileStorage(Protocol):
    """The slot store. Nothing here raises for an engine or a disk that fails: that is logged."""

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        """Return whether the limits of the disk and of writes per hour let so much be saved now."""

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        """Have an engine write an idle slot; return once it has, or None where it did not.

        The file is verified and stored after that; then `Router.add_slot_file` is called with it,
        and `Router.remove_slot_files` with those that it replaces. It is dropped where the engine
        wrote another number of tokens than `tokens` or up to 2 fewer.
        """

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        """Fill an idle slot from a file, verified before; None where that failed.

        A file that is missing, altered or refused is removed from the router before this returns.
        """


class NoSlotFiles:
    """Keeps nothing on disk."""

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return False

    async def save(
        self, _instance: str, _slot: int, _tokens: int, _what: ConversationFingerprint, /
    ) -> Transfer | None:
        return None

    async def restore(self, _instance: str, _slot: int, _name: str, /) -> Transfer | None:
        return None


NO_SLOT_FILES: Final = NoSlotFiles()


Operation = Literal["save", "restore"]


@dataclass(slots=True)
class OperationCounts:
    """Since the start; `failures` are those that gave nothing."""

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
    """A storage, with counts by model.

    Args:
        storage: The storage.
        model_of: Returns the model of an instance; None of one that is gone.
    """

    def __init__(self, storage: SlotFileStorage, model_of: Callable[[str], str | None]) -> None:
        self._storage = storage
        self._model_of = model_of
        self._counts: dict[str, ModelCounts] = {}

    @property
    def counts(self) -> Mapping[str, ModelCounts]:
        """By model; those without any are missing."""
        return self._counts

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        return self._storage.may_save(instance, size_bytes)

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        done = await self._storage.save(instance, id_slot, tokens, fingerprint)
        self._note("save", instance, done)
        return done

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        done = await self._storage.restore(instance, id_slot, name)
        self._note("restore", instance, done)
        return done

    def _note(self, operation: Operation, instance: str, transfer: Transfer | None) -> None:
        if model := self._model_of(instance):
            self._counts.setdefault(model, no_counts())[operation].note(transfer)


# Before the first transfer: 10 ms, and 1 GB per second. SmolLM2-135M, build 10434, 2 cores: 24 MB
# saved in 10 to 20 ms, restored in 8.
_FIXED_S: Final = 0.01
_BYTE_S: Final = 1e-9
# So many bytes take about as long as what a transfer takes besides.
_SCALES: Final = (1.0, 10e6)


class TransferRates:
    """Of one model and one direction, to or from its files."""

    def __init__(self) -> None:
        self._seconds = LeastSquares(_SCALES, (_FIXED_S, _BYTE_S))

    def note(self, transfer: Transfer) -> None:
        if transfer.duration_s > 0:
            self._seconds.add((1.0, transfer.size_bytes), transfer.duration_s)

    def duration_s(self, size_bytes: float) -> float:
        """Return the expected seconds for so many bytes."""
        return self._seconds.value((1.0, size_bytes))


# Before the first: half of them, after half a minute.
_PRIOR: Final = 0.5
_PRIOR_SAMPLES: Final = 2.0
_RETURN_S: Final = 30.0
# Programs return at once, and the people before them later.
_RETURN_MIN_S: Final = 5.0
# An old return counts for less: the latest sixty or so count.
_KEPT: Final = 0.984
# A conversation may still return after any time.
_LEAST: Final = 0.02
# Conversations of fewer turns than this are told apart.
_TURNS_MAX: Final = 4
_WAITING_MAX: Final = 512
# What the waiting ones say is counted once in so long.
_COUNTED_S: Final = 0.25


@dataclass(slots=True)
class _Waiting:
    """A conversation after its last turn."""

    turns: int
    tokens: int
    ended_at_s: float


@dataclass(slots=True)
class _Tally:
    returned: float = 0.0
    gone: float = 0.0

    def add(self, *, returned: float = 0.0, gone: float = 0.0) -> None:
        self.returned = _KEPT * self.returned + returned
        self.gone = _KEPT * self.gone + gone


class ReturnRates:
    """Of one model. Conversations are told apart by numbers; remembers at most 512 of them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._tallies = [_Tally() for _ in range(_TURNS_MAX)]
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
        """Note that a turn has ended, with the tokens that the conversation has now.

        Returns those that it had after the turn before; None where that is not known.
        """
        before = self._waiting.pop(conversation, None)
        if before:
            pause_s = max(_RETURN_MIN_S, began_at_s - before.ended_at_s)
            self._log_return_s = average(self._log_return_s, math.log(pause_s))
            self._tallies[_group(before.turns)].add(returned=1.0)
        turns = before.turns + 1 if before else 1
        self._waiting[conversation] = _Waiting(turns, tokens, ended_at_s)
        if len(self._waiting) > _WAITING_MAX:
            _, oldest = self._waiting.popitem(last=False)
            self._tallies[_group(oldest.turns)].add(gone=1.0)
        return before.tokens if before else None

    def return_p(self, conversation: int, now_s: float) -> float:
        """Return the chance that a conversation returns after the turn that it ended last."""
        if now_s - self._counted_at_s >= _COUNTED_S or not self._shares:
            self._count(now_s)
        waiting = self._waiting.get(conversation)
        if waiting is None:
            return max(_LEAST, self._shares[0])
        share = self._shares[_group(waiting.turns)]
        late = 1 - self._elapsed(waiting, now_s)
        return max(_LEAST, share * late / (1 - share * (1 - late)))

    def _elapsed(self, waiting: _Waiting, now_s: float) -> float:
        """Return which share of those that return would have done so by now.

        A log-logistic distribution: some return ten times later than is usual.
        """
        since_s = max(0.0, now_s - waiting.ended_at_s)
        return since_s / (since_s + self.return_s)

    def _count(self, now_s: float) -> None:
        gone = [tally.gone for tally in self._tallies]
        for conversation in self._waiting.values():
            gone[_group(conversation.turns)] += self._elapsed(conversation, now_s)
        returned = [tally.returned for tally in self._tallies]
        prior = _share(sum(returned), sum(gone), _PRIOR)
        self._shares = [_share(*both, prior) for both in zip(returned, gone, strict=True)]
        self._counted_at_s = now_s


def _group(turns: int) -> int:
    return min(turns, _TURNS_MAX) - 1


def _share(returned: float, gone: float, prior: float) -> float:
    return (returned + _PRIOR_SAMPLES * prior) / (returned + gone + _PRIOR_SAMPLES)


# Before the first return; and never less, for a process may end.
_LOSS: Final = 0.5
_LEAST_LOSS: Final = 0.05
# Long prompts go on being tried.
_LEAST_USE: Final = 0.02


class SlotFileMeasures:
    """Of one model on this machine."""

    def __init__(self) -> None:
        self._saves = TransferRates()
        self._restores = TransferRates()
        self._returns = ReturnRates()
        self._loss = _LOSS
        self._use = 1.0

    def note_save(self, transfer: Transfer) -> None:
        self._saves.note(transfer)

    def note_restore(self, transfer: Transfer) -> None:
        self._restores.note(transfer)

    def note_use(self, restored: int, found: int) -> None:
        """Note how many tokens of a prompt a slot was filled with, and how many its engine found.

        A recurrent model whose template leaves out the reasoning of earlier answers finds none.
        """
        if restored > 0:
            self._use = average(self._use, min(1.0, found / restored))

    def note_turn(
        self, conversation: int, began_at_s: float, ended_at_s: float, tokens: int, found: int
    ) -> None:
        """Note that a turn has ended.

        Args:
            conversation: Its number.
            began_at_s: Monotonic, as `ended_at_s`.
            ended_at_s: When the response was complete.
            tokens: That it has now.
            found: Of these, in a slot or in the host cache; 0 where it was restored from a file.
        """
        before = self._returns.note_turn(conversation, began_at_s, ended_at_s, tokens)
        if before:
            self._loss = average(self._loss, 1 - min(1.0, found / before))

    def save_s(self, size_bytes: float) -> float:
        return self._saves.duration_s(size_bytes)

    def restore_s(self, size_bytes: float) -> float:
        return self._restores.duration_s(size_bytes)

    def return_p(self, conversation: int, now_s: float) -> float:
        """Return the chance that a conversation returns after the turn that it ended last."""
        return self._returns.return_p(conversation, now_s)

    @property
    def use(self) -> float:
        """The share of restored tokens that engines find."""
        return max(_LEAST_USE, self._use)

    @property
    def loss_p(self) -> float:
        """The share of a conversation that no slot and no host cache holds when it returns."""
        return max(_LEAST_LOSS, self._loss)


# Estimates are wrong by a factor of two, and the time of a disk counts too.
_MARGIN: Final = 2.0
# Fewer tokens than this are computed as quickly as found.
_WORTH_TOKENS: Final = 32
# Decoded by a stream from one pause to the next.
_TOKENS_BETWEEN: Final = 150
# Of the gap between two tokens: a pause that is no longer is not noticed.
_SHORT_PAUSE: Final = 0.25


@dataclass(frozen=True, slots=True)
class SaveCase:
    """What is expected of saving one slot.

    Attributes:
        tokens: Of its conversation that are in no file.
        prefill_tps: Tokens that the engine computes in a second, above 0.
        save_s: For which the engine computes nothing else.
        restore_s: The same when it is filled again.
        return_p: Chance that the conversation returns and goes on from its file.
        loss_p: Chance that no slot and no host cache holds it then.
        streams: That decode on the engine.
        gap_s: Between two tokens of such a stream.
        decoded: Tokens that it decoded since the last save.
        is_taken_next: Whether a request is about to begin in the slot.
    """

    tokens: int
    prefill_tps: float
    save_s: float
    restore_s: float
    return_p: float
    loss_p: float
    streams: int = 0
    gap_s: float = 0.0
    decoded: float = 0.0
    is_taken_next: bool = False

    @property
    def saving_s(self) -> float:
        """Expected seconds of an engine that a file saves; what is worth more is saved first."""
        computed_s = self.tokens / self.prefill_tps
        return self.return_p * self.loss_p * max(0.0, computed_s - self.restore_s)

    @property
    def cost_s(self) -> float:
        return self.save_s * (1 + self.streams)


def is_worth_saving(case: SaveCase, pause_max_s: float) -> bool:
    """Return whether a save gains more than it costs; `pause_max_s` holds while streams decode."""
    if case.tokens < _WORTH_TOKENS or case.saving_s <= _MARGIN * case.cost_s:
        return False
    return not case.streams or case.save_s <= pause_max_s


def due_in_s(case: SaveCase) -> float:
    """Return when the streams may be paused again: 0 where at once."""
    is_short = case.save_s <= _SHORT_PAUSE * case.gap_s
    if case.is_taken_next or is_short or not case.streams:
        return 0.0
    return max(0.0, _TOKENS_BETWEEN - case.decoded) * case.gap_s


def pays_to_save(case: SaveCase, pause_max_s: float) -> bool:
    """Return whether to save a slot now."""
    return is_worth_saving(case, pause_max_s) and due_in_s(case) <= 0


def pays_to_restore(more_tokens: int, cost_tokens: int) -> bool:
    """Return whether to fill a slot from a file instead of going on from what the caches hold.

    Args:
        more_tokens: Of the prompt, that the file holds and the caches are not believed to hold.
        cost_tokens: That the engine computes in the time of reading the file. Its streams wait no
            longer for that than for the prompt.
    """
    return more_tokens >= _WORTH_TOKENS and more_tokens > _MARGIN * cost_tokens
