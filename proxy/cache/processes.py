"""The processes of the instances, and how reliable the beliefs about their caches are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from proxy.cache.host_cache import HostCache
from proxy.cache.slot_map import SlotMap
from proxy.upstream.upstream import Upstream

# Hit ratios are rounded to this many steps; instances of the same step are looked up together.
RATIO_STEPS: Final = 16
# Ended processes are forgotten in groups of this size, because it takes a scan of all beliefs.
_ENDED_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Run:
    """One process of an instance.

    Attributes:
        identity: Values that differ between processes of the same instance.
        bit: A number with one bit set: this run as a set.
        hit_ratio: Recent share of expected cached tokens that the engine found; 0 to 1.
        has_failed: Whether it ended without being stopped.
        host_cache: None if it has none or its slots are not tracked.
    """

    name: str
    identity: tuple[object, ...]
    bit: int
    slot_map: SlotMap
    resumable_prompts: int
    cache_key: str = ""
    hit_ratio: float = 1.0
    has_ended: bool = False
    has_failed: bool = False
    host_cache: HostCache | None = None

    @property
    def ratio_step(self) -> int:
        return round(self.hit_ratio * RATIO_STEPS)

    def holds(self, conversation: object) -> bool:
        return self.slot_map.holds(conversation) or self.slot_map.is_copied(conversation)


class Runs(dict[str, Run]):
    """The latest process of each instance, by name.

    `forget` is called with a set of ended processes before their bits are used again.

    Attributes:
        by_ratio: Sets of processes by the step of their hit ratio.
        with_files: Processes that can restore slot files, by name.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        super().__init__()
        self.by_ratio: dict[int, int] = {}
        self.with_files: dict[str, Run] = {}
        self._forget = forget
        self._ended = 0
        self._used = 0  # bits

    def is_latest(self, run: Run) -> bool:
        return self.get(run.name) is run

    def register(self, upstream: Upstream) -> Run | None:
        """Return the process of an instance if it is new, otherwise None."""
        # The supervisor gives each process its own key.
        identity = (upstream.api_key, upstream.socket, upstream.host, upstream.port)
        before = self.get(upstream.name)
        if before and before.identity == identity:
            return None
        if before:
            self._end(before)
        host_cache = None
        if upstream.can_name_slots and upstream.host_cache_bytes and upstream.token_bytes:
            host_cache = HostCache(
                upstream.host_cache_bytes, upstream.token_bytes, upstream.state_bytes
            )
        unused_bit = ~self._used & (self._used + 1)
        self._used |= unused_bit
        run = Run(
            upstream.name,
            identity,
            unused_bit,
            SlotMap(upstream.slots, host_cache),
            upstream.resumable_prompts,
            upstream.cache_key,
            host_cache=host_cache,
        )
        self[upstream.name] = run
        if run.cache_key:
            self.with_files[run.name] = run
        self._put(run, RATIO_STEPS)
        return run

    def end(self, name: str) -> None:
        if run := self.pop(name, None):
            self._end(run)

    def set_hit_ratio(self, run: Run, hit_ratio: float) -> None:
        before = run.ratio_step
        run.hit_ratio = hit_ratio
        if run.ratio_step != before:
            self.by_ratio[before] &= ~run.bit
            self._put(run, run.ratio_step)

    def _put(self, run: Run, step: int) -> None:
        self.by_ratio[step] = self.by_ratio.get(step, 0) | run.bit

    def _end(self, run: Run) -> None:
        self.with_files.pop(run.name, None)
        self.by_ratio[run.ratio_step] &= ~run.bit
        self._ended |= run.bit
        if self._ended.bit_count() >= _ENDED_MAX:
            self._forget(self._ended)
            self._used &= ~self._ended
            self._ended = 0
