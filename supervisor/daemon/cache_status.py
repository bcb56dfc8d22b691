"""Builds control messages about the places that keep prompts: slots, host cache, disk. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from proxy.cache.save_policy import ModelCounts, OperationCounts, no_counts
from proxy.observe.cache_finding import Tier
from proxy.router.model_queue import ModelQueue
from proxy.router.next_turns import NextTurnCounts
from proxy.router.router import Router
from proxy.router.slots import CacheContents, TierUse
from supervisor.daemon import control_messages as messages
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
) -> messages.CachesStatus:
    on_disk, contents = _by_model(saved), router.cache_contents()
    found = [
        cache_status(
            name,
            on_disk.get(name, ()),
            contents=contents.get(name),
            use=router.cache_use.models.get(name, _NO_USE),
            counts=router.storage.counts.get(name),
            ahead=router.next_turns.counts.get(name),
            queue=router.queues.get(name),
            not_saved_reason=not_persisted_reason(models[name]) if name in models else None,
        )
        for name in dict.fromkeys((*models, *on_disk))
    ]
    by_name = {status.model: status.skipped for status in found}
    for (name, reason), count in router.saves_skipped.items():
        by_name.get(name, {})[reason.value] = count
    disk = messages.SlotDiskStatus(
        size_bytes=_size_bytes(saved),
        limit_bytes=budget.size_bytes,
        limit_is_auto=budget.is_auto,
        written_bytes=round(limits.written_bytes),
        write_limit_bytes=budget.write_hour_bytes,
        paused=limits.pause.is_on,
    )
    return messages.CachesStatus(models=found, disk=disk)


def saved_status(saved: Sequence[Manifest]) -> messages.CachesStatus:
    """Return the part of the status that is known without a daemon: the files on disk."""
    found = [cache_status(model, its) for model, its in _by_model(saved).items()]
    return messages.CachesStatus(found, messages.SlotDiskStatus(_size_bytes(saved)))


def _size_bytes(saved: Iterable[Manifest]) -> int:
    return sum(manifest.size_bytes for manifest in saved)


def cache_status(  # noqa: PLR0913 (all by name)
    model: str,
    saved: Sequence[Manifest],
    *,
    contents: CacheContents | None = None,
    use: Mapping[Tier, TierUse] = _NO_USE,
    counts: ModelCounts | None = None,
    ahead: NextTurnCounts | None = None,
    queue: ModelQueue | None = None,
    not_saved_reason: str | None = None,
) -> messages.CacheStatus:
    """Return the tiers of a model; `contents` is None if no instance of it runs."""
    oldest = min((manifest.saved_at for manifest in saved), default=None)
    return messages.CacheStatus(
        model=model,
        slots=contents.slots if contents else 0,
        prompts=sum(tier.prompts for tier in use.values()),
        prompt_tokens=sum(tier.tokens for tier in use.values()),
        computed_tokens=use[Tier.NONE].tokens,
        tiers=_tiers(saved, contents or CacheContents(), use),
        oldest_at=oldest.isoformat(timespec="seconds") if oldest else None,
        saves=_file_status((counts or no_counts())["save"]),
        restores=_file_status((counts or no_counts())["restore"]),
        next_turns=messages.NextTurnStatus.of(ahead or NextTurnCounts()),
        skipped={},
        not_saved_reason=not_saved_reason,
        held=queue.holds.slots_by_name() if queue else {},
        holds=dict(queue.holds.counts) if queue else {},
        held_s=queue.holds.held_s if queue else 0.0,
        paused=[
            messages.PausedRequest(request.request_id, request.client, round(paused_s, 3))
            for request, paused_s in (queue.paused() if queue else ())
        ],
        handovers=queue.handovers if queue else 0,
        handovers_s=round(queue.handovers_s, 3) if queue else 0.0,
    )


def _by_model(saved: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for manifest in saved:
        found.setdefault(manifest.model, []).append(manifest)
    return found


def _tiers(
    saved: Sequence[Manifest], contents: CacheContents, use: Mapping[Tier, TierUse]
) -> list[messages.TierStatus]:
    copied, copied_bytes = contents.copied_conversations, round(contents.copied_bytes)
    copies = (copied, contents.copied_tokens, copied_bytes)
    held: Mapping[Tier, tuple[int | None, int | None, int | None]] = {
        Tier.SLOT: (contents.conversations, contents.tokens, None),
        Tier.HOST_CACHE: (None, None, None) if copied is None else copies,
        Tier.DISK: (len(saved), sum(manifest.tokens for manifest in saved), _size_bytes(saved)),
    }
    limit_bytes = contents.host_cache_bytes
    host_cache_bytes = None if math.isinf(limit_bytes) else round(limit_bytes)
    return [
        messages.TierStatus(
            tier=tier.value,
            conversations=conversations,
            tokens=tokens,
            size_bytes=size_bytes,
            limit_bytes=host_cache_bytes if tier is Tier.HOST_CACHE else None,
            prompts=use[tier].prompts,
            found_tokens=use[tier].tokens,
            saved_s=round(use[tier].saved_s, 3),
        )
        for tier, (conversations, tokens, size_bytes) in held.items()
    ]


def _file_status(counts: OperationCounts) -> messages.SlotFileStatus:
    return messages.SlotFileStatus.of(
        counts, count=counts.done, duration_s=round(counts.duration_s, 3)
    )
