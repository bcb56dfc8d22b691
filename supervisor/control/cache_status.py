"""Where the prompts of a model are kept, as control messages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from proxy.router.cache_contents import CacheContents
from proxy.router.cache_use import TierUse
from proxy.router.router import Router
from proxy.slot_files.counted_storage import ModelCounts
from proxy.slot_files.tiers import Tier
from supervisor.control.messages import CacheStatus, SlotFileStatus, TierStatus
from supervisor.control.status import not_persisted_reason
from supervisor.fleet.model import Model
from supervisor.slot_store.manifest import Manifest

_NO_USE: Final[Mapping[Tier, TierUse]] = {tier: TierUse() for tier in Tier}


def cache_statuses(
    models: Mapping[str, Model], router: Router, saved: Iterable[Manifest]
) -> list[CacheStatus]:
    """Return the tiers of all models, those that are only on disk among them."""
    on_disk, contents = _by_model(saved), router.cache_contents()
    return [
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


def saved_statuses(saved: Iterable[Manifest]) -> list[CacheStatus]:
    """Return what is known without a daemon."""
    return [cache_status(model, found) for model, found in _by_model(saved).items()]


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
        "prompts": sum(one.prompts for one in use.values()),
        "prompt_tokens": sum(one.tokens for one in use.values()),
        "computed_tokens": use[Tier.NONE].tokens,
        "tiers": [_slot(contents, use), _host_cache(contents, use), _disk(saved, use)],
        "oldest_at": _oldest(saved),
        "saves": _operation(counts, is_save=True),
        "restores": _operation(counts, is_save=False),
        "not_saved_reason": not_saved_reason,
    }


def _by_model(saved: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for one in saved:
        found.setdefault(one.model, []).append(one)
    return found


def _slot(contents: CacheContents | None, use: Mapping[Tier, TierUse]) -> TierStatus:
    held = contents or CacheContents()
    return _tier(Tier.SLOT, use, (held.conversations, held.tokens, None))


def _host_cache(contents: CacheContents | None, use: Mapping[Tier, TierUse]) -> TierStatus:
    limit_bytes = contents.host_cache_bytes if contents else 0.0
    return _tier(Tier.HOST_CACHE, use, (None, None, None), limit_bytes)


def _disk(saved: Sequence[Manifest], use: Mapping[Tier, TierUse]) -> TierStatus:
    size_bytes = sum(one.size_bytes for one in saved)
    return _tier(Tier.DISK, use, (len(saved), sum(one.tokens for one in saved), size_bytes))


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
    oldest: datetime | None = min((one.saved_at for one in saved), default=None)
    return oldest.isoformat(timespec="seconds") if oldest else None


def _operation(counts: ModelCounts | None, *, is_save: bool) -> SlotFileStatus:
    done = (counts or ModelCounts()).operations["save" if is_save else "restore"]
    return {
        "count": done.done,
        "failures": done.failures,
        "tokens": done.tokens,
        "size_bytes": done.size_bytes,
        "duration_s": round(done.duration_s, 3),
    }
