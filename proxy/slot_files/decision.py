"""Whether to save a slot to a file, and whether to fill a slot from one. Pure.

A save pays when the prompt that would otherwise be computed again takes longer than the engine's
pause, which its request and each stream that decodes there wait for. The prompt counts by the
chance that its conversation returns and that its cache is lost until then.

The expected pause of a save is no longer than a limit while streams decode. A stream notices it as
one long gap between two tokens. Less than one such gap in a hundred leaves the 99th percentile as
it is; so do any number of pauses that are short beside a gap. A slot that is taken next is saved
regardless of how often: the prompt that takes it interrupts the streams as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
