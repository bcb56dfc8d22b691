"""The state that listeners get, made at most four times a second, and only for listeners."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from proxy.dashboard.event_history import EventHistory
from proxy.dashboard.host import DashboardHost
from proxy.dashboard.merge_patch import merge_patch
from proxy.dashboard.rates import Rates, Totals, with_running
from proxy.dashboard.sources import Sources
from proxy.dashboard.state import Observed, State, caches_of, state_of
from proxy.slot_files.tiers import Tier

TICK_S: Final = 0.25
_CACHES: Final[Mapping[str, str]] = {
    "expected_tokens": "expected_cached_tokens",
    "expected_tokens_found": "expected_tokens_found",
    "found_tokens": "cached_tokens",
    "computed_tokens": "prompt_tokens",
}


class LiveState:
    """`server` are the members of the state that do not change."""

    def __init__(
        self,
        host: DashboardHost,
        sources: Sources,
        server: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events = EventHistory()
        self._host = host
        self._sources = sources
        self._server = server
        self._clock = clock
        self._started_at_s = clock()
        self._rates = Rates()
        self._state: State = {}
        self._made_at_s = float("-inf")
        self._last_patch: tuple[State, State, dict[str, Any]] | None = None
        host.observe(self.events.add)

    @property
    def now_s(self) -> float:
        """Since the start of the daemon."""
        return self._clock() - self._started_at_s

    def sample(self) -> None:
        """Take the figures of one more second."""
        queues = self._sources.router.queues().values()
        queued = sum(one.interactive + one.batch for one in queues)
        totals = with_running(self._ended(), self._sources.router.instances())
        self._rates.add(totals, queued, self.now_s)

    def snapshot(self) -> tuple[State, dict[str, Any]]:
        """The state, and what a listener gets of it at first."""
        state = self.state()
        first = {
            "now_s": round(self.now_s, 3),
            "state": state,
            "history": self._rates.history(),
        }
        return state, first

    def state(self) -> State:
        """The present state; never changed, only replaced."""
        now_s = self._clock()
        if now_s - self._made_at_s >= TICK_S / 2:
            self._made_at_s = now_s
            self._state = state_of(self._observed(now_s))
        return self._state

    def patch(self, before: State, after: State) -> dict[str, Any]:
        """The merge patch between two states; listeners that read as fast share it."""
        if self._last_patch and self._last_patch[0] is before and self._last_patch[1] is after:
            return self._last_patch[2]
        patch = merge_patch(before, after)
        self._last_patch = (before, after, patch)
        return patch

    def _observed(self, now_s: float) -> Observed:
        host, sources = self._host, self._sources
        phase = "stopping" if sources.server_state.is_draining else "serving"
        return Observed(
            now_s,
            self._started_at_s,
            {**self._server, "url": host.url, "state": phase},
            sources.loader.models(),
            host.models(),
            host.instances(),
            sources.router.instances(),
            sources.router.queues(),
            sources.requests.stats(),
            host.nodes(),
            self._rates.latest(),
            caches_of(
                {name: self._by_model(counter) for name, counter in _CACHES.items()}
                | {"disk_tokens": self._from_disk()}
            ),
        )

    def _ended(self) -> Totals:
        counts = self._sources.metrics.counts
        first_tokens, first_tokens_s = 0, 0.0
        for histogram in self._sources.metrics.histograms("time_to_first_token_seconds"):
            first_tokens += sum(histogram.counts)
            first_tokens_s += histogram.total
        return Totals(
            sum(counts("decoded_tokens").values()),
            sum(counts("prompt_tokens").values()),
            first_tokens,
            first_tokens_s,
        )

    def _from_disk(self) -> Iterator[tuple[str, float]]:
        for model, tiers in self._sources.router.cache_use.models.items():
            yield model, tiers[Tier.DISK].tokens

    def _by_model(self, counter: str) -> Iterator[tuple[str, float]]:
        sums: dict[str, float] = defaultdict(float)
        for (model, *_), count in self._sources.metrics.counts(counter).items():
            sums[model] += count
        yield from sums.items()
