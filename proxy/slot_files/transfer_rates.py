"""How long saving and restoring a slot takes: running averages over transfers. Pure."""

from __future__ import annotations

from typing import Final

from proxy.estimate.least_squares import LeastSquares
from proxy.slot_files.storage import Transfer

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
