"""Where the prompts of a model are kept, as control messages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from proxy.cache.save_policy import ModelCounts, no_counts
from proxy.observe.cache_finding import Tier
from proxy.router.cache_use import CacheContents, TierUse
from proxy.router.router import Router
from supervisor.daemon.control_messages import (
    CachesStatus,
    CacheStatus,
    SlotDiskStatus,
    SlotFileStatus,
    TierStatus,
)
from supervisor.daemon.model_status import not_persisted_reason
from supervisor.fleet.model import Model
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.save_limits import SaveLimits

_NO_USE: Final[Mapping[Tier, TierUse]] = {tier: TierUse() for tier in Tier}


def caches_status(
    models: Mapping[str, Model],
    router: Router,
    saved: Sequence[Manifest],
    budget: DiskBudget,
    limits: SaveLimits,
) -> CachesStatus:
    """Return the tiers of all models, those that are only on disk among them."""
    on_disk, contents = _by_model(saved), router.cache_contents()
    found = [
        cache_status(
            name,
            on_disk.get(name, ()),
            contents=contents.get(name),
            use=router.cache_use.models.get(name, _NO_USE),
            counts=router.slot_file_counts.get(name),
            not_saved_reason=not_persisted_reason(models[name]) if name in models else None,
        )
        for name in dict.fromkeys((*models, *on_disk))
    ]
    for status in found:
        status["skipped"] = _count_skipped_saves(router, status["model"])
    disk: SlotDiskStatus = {
        "size_bytes": _size_bytes(saved),
        "limit_bytes": budget.size_bytes,
        "written_bytes": round(limits.written_bytes),
        "write_limit_bytes": budget.write_hour_bytes,
        "paused": limits.pause.is_on,
    }
    return {"models": found, "disk": disk}


def saved_status(saved: Sequence[Manifest]) -> CachesStatus:
    """Return what is known without a daemon."""
    found = [cache_status(model, its) for model, its in _by_model(saved).items()]
    disk: SlotDiskStatus = {
        "size_bytes": _size_bytes(saved),
        "limit_bytes": None,
        "written_bytes": None,
        "write_limit_bytes": None,
        "paused": False,
    }
    return {"models": found, "disk": disk}


def _size_bytes(saved: Iterable[Manifest]) -> int:
    return sum(manifest.size_bytes for manifest in saved)


def cache_status(
    model: str,
    saved: Sequence[Manifest],
    *,
    contents: CacheContents | None = None,
    use: Mapping[Tier, TierUse] = _NO_USE,
    counts: ModelCounts | None = None,
    not_saved_reason: str | None = None,
) -> CacheStatus:
    """Return the tiers of a model; `contents` is None where no instance of it runs."""
    return {
        "model": model,
        "slots": contents.slots if contents else 0,
        "prompts": sum(tier.prompts for tier in use.values()),
        "prompt_tokens": sum(tier.tokens for tier in use.values()),
        "computed_tokens": use[Tier.NONE].tokens,
        "tiers": [_slot(contents, use), _host_cache(contents, use), _disk(saved, use)],
        "oldest_at": _oldest(saved),
        "saves": _operation(counts, is_save=True),
        "restores": _operation(counts, is_save=False),
        "skipped": {},
        "not_saved_reason": not_saved_reason,
    }


def _count_skipped_saves(router: Router, model: str) -> dict[str, int]:
    skipped = router.saves_skipped.items()
    return {reason.value: count for (name, reason), count in skipped if name == model}


def _by_model(saved: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for manifest in saved:
        found.setdefault(manifest.model, []).append(manifest)
    return found


def _slot(contents: CacheContents | None, use: Mapping[Tier, TierUse]) -> TierStatus:
    held = contents or CacheContents()
    return _tier(Tier.SLOT, use, (held.conversations, held.tokens, None))


def _host_cache(contents: CacheContents | None, use: Mapping[Tier, TierUse]) -> TierStatus:
    held = contents or CacheContents()
    if held.copied_conversations is None:
        return _tier(Tier.HOST_CACHE, use, (None, None, None), held.host_cache_bytes)
    copies = (held.copied_conversations, held.copied_tokens, round(held.copied_bytes))
    return _tier(Tier.HOST_CACHE, use, copies, held.host_cache_bytes)


def _disk(saved: Sequence[Manifest], use: Mapping[Tier, TierUse]) -> TierStatus:
    tokens = sum(manifest.tokens for manifest in saved)
    return _tier(Tier.DISK, use, (len(saved), tokens, _size_bytes(saved)))


def _tier(
    tier: Tier,
    use: Mapping[Tier, TierUse],
    held: tuple[int | None, int | None, int | None],
    limit_bytes: float = math.inf,
) -> TierStatus:
    conversations, tokens, size_bytes = held
    return {
        "tier": tier.value,
        "conversations": conversations,
        "tokens": tokens,
        "size_bytes": size_bytes,
        "limit_bytes": None if math.isinf(limit_bytes) else round(limit_bytes),
        "prompts": use[tier].prompts,
        "found_tokens": use[tier].tokens,
        "saved_s": round(use[tier].saved_s, 3),
    }


def _oldest(saved: Sequence[Manifest]) -> str | None:
    oldest: datetime | None = min((manifest.saved_at for manifest in saved), default=None)
    return oldest.isoformat(timespec="seconds") if oldest else None


def _operation(counts: ModelCounts | None, *, is_save: bool) -> SlotFileStatus:
    done = (counts or no_counts())["save" if is_save else "restore"]
    return {
        "count": done.done,
        "failures": done.failures,
        "tokens": done.tokens,
        "size_bytes": done.size_bytes,
        "duration_s": round(done.duration_s, 3),
    }
