"""Metrics of the three tiers of the prompt cache: slot, host cache, slot file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from proxy.router.cache_use import TierUse
from proxy.router.router import Router
from proxy.slot_files.counted_storage import OperationCounts

_BY_TIER: Final[Mapping[str, tuple[str, Callable[[TierUse], float]]]] = {
    "prompts_by_tier": (
        "Prompts by the tier in which some of them was found; none: in none.",
        lambda use: use.prompts,
    ),
    "prompt_tokens_by_tier": (
        "Prompt tokens by the tier in which they were found; none: computed.",
        lambda use: use.tokens,
    ),
    "prefill_saved_seconds": (
        "Time that computing the found tokens would have taken, less that of restores.",
        lambda use: use.saved_s,
    ),
}
_BY_OPERATION: Final[Mapping[str, tuple[str, Callable[[OperationCounts], float]]]] = {
    "slot_file_operations": (
        "Slots written to a file while the model serves, or filled from one.",
        lambda counts: counts.done,
    ),
    "slot_file_failures": (
        "Saves and restores of single slots that failed.",
        lambda counts: counts.failures,
    ),
    "slot_file_tokens": ("Tokens saved and restored.", lambda counts: counts.tokens),
    "slot_file_bytes": ("Bytes saved and restored.", lambda counts: counts.size_bytes),
    "slot_file_seconds": (
        "Time that engines took to save and restore.",
        lambda counts: counts.duration_s,
    ),
}


def cache_metrics(router: Router) -> Iterator[Metric]:
    """Yield what was counted since the start."""
    for name, (text, of_tier) in _BY_TIER.items():
        family = CounterMetricFamily(f"corral_{name}", text, labels=("model", "tier"))
        for model, tiers in router.cache_use.models.items():
            for tier, use in tiers.items():
                family.add_metric((model, tier), of_tier(use))
        yield family
    for name, (text, of_operation) in _BY_OPERATION.items():
        family = CounterMetricFamily(f"corral_{name}", text, labels=("model", "operation"))
        for model, counts in router.slot_file_counts.items():
            for operation, done in counts.items():
                family.add_metric((model, operation), of_operation(done))
        yield family
    yield _skipped(router)


def _skipped(router: Router) -> Metric:
    family = CounterMetricFamily(
        "corral_slot_file_saves_skipped",
        "Saves of conversations that were skipped, by the reason.",
        labels=("model", "reason"),
    )
    for (model, reason), count in router.saves_skipped.items():
        family.add_metric((model, reason), count)
    return family
