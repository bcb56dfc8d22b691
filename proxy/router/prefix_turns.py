"""Which instances compute right now what a waiting prompt begins with.

Two prompts that begin alike, sent at once, would each have all of it computed, in turns: both take
twice as long. So the second waits until the first is answered, if answers take less time than the
beginning: then an idle slot, the host cache or a file has it. Price: a wait for an answer that
takes longer than was expected; it is no longer than twice that.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Final

from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.outline import shared_blocks
from proxy.prompt_cache.prompt import BLOCK_TOKENS, Prompt
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.router.lease_times import LeaseTimes
from proxy.router.queued_request import QueuedRequest

# What is computed within a batch is not waited for.
_BLOCKS_MIN: Final = 8
# For so many times as long as the first is expected to take.
_PATIENCE: Final = 2.0


class PrefixTurns:
    """For one model; its instances are those that restore slot files."""

    def __init__(self, prefix_index: PrefixIndex, times: LeaseTimes) -> None:
        self._prefix_index = prefix_index
        self._times = times

    def waits(
        self, instances: Iterable[Instance], queued: QueuedRequest, now_s: float
    ) -> dict[str, float]:
        """Return those to leave for now, and for how long at most."""
        prompt = queued.request.prompt
        if prompt is None or len(prompt.blocks) < _BLOCKS_MIN:
            return {}
        found = ((one, self._wait_s(one, prompt, now_s)) for one in instances if one.leases)
        return {one.upstream.name: wait_s for one, wait_s in found if wait_s > 0}

    def _wait_s(self, instance: Instance, prompt: Prompt, now_s: float) -> float:
        """Return for how long a wait would be worth it; 0 where nothing is to be gained."""
        begun = ((_shared(one, prompt), one) for one in instance.leases if not one.is_ending)
        shared, first = max(begun, key=itemgetter(0), default=(0, None))
        if first is None or shared < _BLOCKS_MIN:
            return 0.0
        more = shared - self._prefix_index.available_blocks(instance.upstream, prompt)
        gain_s = more * BLOCK_TOKENS / instance.rates.prefill_tps
        if more < _BLOCKS_MIN or self._times.decode_s > gain_s:
            return 0.0
        prompts = instance.work.prefilling + 1
        expected_s = prompts * prompt.tokens / instance.rates.prefill_tps + self._times.decode_s
        return _PATIENCE * expected_s - (now_s - first.began_at_s)


def _shared(lease: Lease, prompt: Prompt) -> int:
    begun = lease.request.prompt
    return shared_blocks(begun.blocks, prompt.blocks) if begun else 0
