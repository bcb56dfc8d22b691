"""What is measured of a model's slot files: durations, returns, and what its caches lost. Pure."""

from __future__ import annotations

from typing import Final

from proxy.slot_files.return_rates import ReturnRates
from proxy.slot_files.storage import Transfer
from proxy.slot_files.transfer_rates import TransferRates
from proxy.upstream.timings import average

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
