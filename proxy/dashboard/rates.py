"""What the server does in each second, over the last five minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.router.instances import InstanceStats

INTERVAL_S: Final = 1.0
_SAMPLES: Final = 300


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start, of requests that have ended; tokens also of those that are running.

    Attributes:
        first_tokens: Requests that got a first token, and how long all of them together waited.
    """

    decoded_tokens: float = 0.0
    prompt_tokens: float = 0.0
    first_tokens: int = 0
    first_tokens_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One second; `first_token_s` is the mean of the requests that ended in it."""

    at_s: int
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    queued: int = 0
    first_token_s: float | None = None


def with_running(ended: Totals, instances: Iterable[InstanceStats]) -> Totals:
    """Add the tokens of requests that are running."""
    running = [
        lease for instance in instances for lease in instance.leases if lease.phase != "ending"
    ]
    return Totals(
        ended.decoded_tokens + sum(one.decoded for one in running),
        ended.prompt_tokens + sum(max(0, one.prompt_done - one.cached) for one in running),
        ended.first_tokens,
        ended.first_tokens_s,
    )


@dataclass(slots=True)
class Rates:
    """The latest samples. A request that ends may be counted a moment late, but only once."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _before: Totals | None = None
    _before_at_s: float = 0.0

    def add(self, totals: Totals, queued: int, at_s: float) -> None:
        """Take the totals at a time, some time after those before."""
        before, elapsed_s = self._before or totals, max(at_s - self._before_at_s, 1e-3)
        first_tokens = totals.first_tokens - before.first_tokens
        decoded = max(totals.decoded_tokens, before.decoded_tokens)
        prompt = max(totals.prompt_tokens, before.prompt_tokens)
        waited_s = totals.first_tokens_s - before.first_tokens_s
        sample = Sample(
            int(at_s),
            round((decoded - before.decoded_tokens) / elapsed_s, 1),
            round((prompt - before.prompt_tokens) / elapsed_s, 1),
            queued,
            round(waited_s / first_tokens, 3) if first_tokens > 0 else None,
        )
        self.samples.append(sample)
        self._before = Totals(decoded, prompt, totals.first_tokens, totals.first_tokens_s)
        self._before_at_s = at_s

    def latest(self) -> dict[str, Any]:
        """The members of the latest sample that are known."""
        if not self.samples:
            return {}
        members = {name: getattr(self.samples[-1], name) for name in Sample.__slots__}
        return {name: value for name, value in members.items() if value is not None}

    def history(self) -> dict[str, Any]:
        """All samples, a list for each member."""
        columns: dict[str, Any] = {
            name: [getattr(one, name) for one in self.samples]
            for name in Sample.__slots__
            if name != "at_s"
        }
        at_s = self.samples[-1].at_s if self.samples else 0
        return {"at_s": at_s, "interval_s": INTERVAL_S, **columns}
