"""The phases of one request's time, which add up to its duration. Pure.

Phases change a few times in a request; a chunk changes them only if the client is behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

Phase = Literal["other", "queued", "evict", "load", "slots", "prefill", "decode", "stalled"]
PHASES: Final[tuple[Phase, ...]] = (
    "queued",
    "evict",
    "load",
    "slots",
    "prefill",
    "decode",
    "stalled",
    "other",
)
_WAITS: Final = frozenset({"other", "queued", "evict", "load"})
_NO_TIME: Final[Mapping[Phase, float]] = dict.fromkeys(PHASES, 0.0)
# `other` is the rest of the duration.
_TIMED: Final = tuple((phase, f"{phase}_ms") for phase in PHASES[:-1])


def _in_ms(seconds: float) -> float:
    """Return milliseconds in whole tenths; `round` takes several times as long."""
    return int(seconds * 10_000) / 10


class Timeline:
    """Times the phases of one request.

    A request in several slots is in the phase of its furthest slot, even while it waits for another
    slot. While the client does not read, the request is stalled.

    Attributes:
        began_at_s: Monotonic time.
        first_token_ms: Time from the beginning to the first token; None before it.
    """

    __slots__ = (
        "_charged",
        "_leases",
        "_phase",
        "_since_s",
        "_spent_s",
        "_stalls",
        "began_at_s",
        "first_token_ms",
    )

    def __init__(self) -> None:
        self.began_at_s = self._since_s = time.monotonic()
        self.first_token_ms: float | None = None
        self._phase: Phase = "other"
        self._charged: Phase = "other"  # the phase, or `stalled`
        self._spent_s = {**_NO_TIME}
        self._leases = 0
        self._stalls = 0

    def wait(self, phase: Phase = "queued") -> None:
        """Begin to wait for a slot, for the memory of a model (`evict`) or for its load."""
        if not self._leases:
            self._enter(phase, time.monotonic())

    def begin_prefill(self, at_s: float, slots_s: float = 0.0) -> None:
        """Note that a slot was leased at this time; `end_lease` follows.

        `slots_s` is the time since then for which the engine listed its slots.
        """
        self._leases += 1
        if self._phase in _WAITS:
            self._enter("prefill", max(at_s, self._since_s))
            self._spent_s["slots"] += slots_s
            self._since_s += slots_s

    def note_token(self) -> None:
        """Note generated text; only the first call counts, and the first of a retry."""
        if self.first_token_ms is not None and self._phase != "prefill":
            return
        now_s = time.monotonic()
        if self.first_token_ms is None:
            self.first_token_ms = _in_ms(now_s - self.began_at_s)
        if self._phase == "prefill":
            self._enter("decode", now_s)

    def end_lease(self) -> None:
        self._leases -= 1
        if not self._leases:
            self._enter("other", time.monotonic())

    def end_wait(self) -> None:
        if not self._leases:
            self._enter("other", time.monotonic())

    @contextmanager
    def time_stall(self) -> Iterator[None]:
        """Count the time of the block as a wait for the client to read."""
        self._charge("stalled")
        self._stalls += 1
        try:
            yield
        finally:
            self._stalls -= 1
            self._charge("stalled" if self._stalls else self._phase)

    @property
    def is_stalled(self) -> bool:
        return self._stalls > 0

    def times_ms(self, engine_decode_ms: float | None = None) -> Mapping[str, float]:
        """Return the duration until now and the time of each phase; `other_ms` is the rest.

        Args:
            engine_decode_ms: The engine's decode time, to split the time of a response that is not
                a stream and so has no time of its first token.
        """
        now_s, spent_s = time.monotonic(), self._spent_s
        spent_s[self._charged] += now_s - self._since_s
        self._since_s = now_s
        if engine_decode_ms and not spent_s["decode"]:
            spent_s["decode"] = min(spent_s["prefill"], engine_decode_ms / 1000)
            spent_s["prefill"] -= spent_s["decode"]
        times_ms = {
            name: int(spent * 10_000) / 10 if (spent := spent_s[phase]) else 0.0
            for phase, name in _TIMED
        }
        duration_ms = _in_ms(now_s - self.began_at_s)
        rest_ms = duration_ms - sum(times_ms.values())
        times_ms["other_ms"] = int(rest_ms * 10 + 0.5) / 10 if rest_ms > 0 else 0.0
        times_ms["duration_ms"] = duration_ms
        return times_ms

    def _enter(self, phase: Phase, at_s: float) -> None:
        self._spent_s[self._charged] += at_s - self._since_s
        self._since_s, self._phase = at_s, phase
        if not self._stalls:
            self._charged = phase

    def _charge(self, phase: Phase) -> None:
        now_s = time.monotonic()
        self._spent_s[self._charged] += now_s - self._since_s
        self._since_s, self._charged = now_s, phase
