"""Where prompts were found, by model and tier, since the start.

The engine reports how many tokens of a prompt it found, not where. Where a file was restored for
the request, or into its slot as the process began, they are its; where the request got the slot of
its conversation, that slot's; else the host cache's, where the engine has one. A prompt that shares
its beginning with whatever its slot held before counts for the host cache too: the engine tells no
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.router.lease import Lease
from proxy.slot_files.tiers import Tier
from proxy.upstream.timings import Timings


@dataclass(slots=True)
class TierUse:
    """Of one model.

    Attributes:
        prompts: Of which at least one token was found there.
        tokens: Found there; of `Tier.NONE`, computed.
        saved_s: What computing these tokens would have taken, less the time of restores.
    """

    prompts: int = 0
    tokens: int = 0
    saved_s: float = 0.0


class CacheUse:
    """Of all models of this machine, without requests of our own."""

    def __init__(self) -> None:
        self._models: dict[str, dict[Tier, TierUse]] = {}

    @property
    def models(self) -> Mapping[str, Mapping[Tier, TierUse]]:
        return self._models

    def note(self, lease: Lease, timings: Timings) -> None:
        """Count a complete response, and note in its lease where its prompt was found."""
        if lease.upstream.node or lease.request.is_background:
            return
        found = timings.cached_tokens
        tiers = self._models.get(lease.request.model)
        if tiers is None:
            tiers = self._models[lease.request.model] = {tier: TierUse() for tier in Tier}
        tiers[Tier.NONE].tokens += timings.prompt_tokens
        lease.tier = _tier(lease) if found else Tier.NONE
        use = tiers[lease.tier]
        use.prompts += 1
        use.tokens += found
        use.saved_s += max(0.0, found / lease.instance.rates.prefill_tps - lease.restore_s)


def _tier(lease: Lease) -> Tier:
    if lease.restored or lease.restored_tokens:
        return Tier.DISK
    is_elsewhere = lease.has_own_slot is False and lease.upstream.host_cache_bytes > 0
    return Tier.HOST_CACHE if is_elsewhere else Tier.SLOT
