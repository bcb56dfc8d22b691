"""Waits until what an instance that drains holds of a conversation is in a file.

An instance is saved as soon as it drains, each slot when its request ends; a client that goes on at
once would come before the file is verified and stored, about a tenth of a second later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.prompt import Prompt
from proxy.prompt_cache.runs import Run
from proxy.prompt_cache.slot_map import SlotContent
from proxy.router.instance_registry import Instances
from proxy.router.lease import Lease

# A shorter conversation is not saved.
_TOKENS_MIN: Final = 256
# Of the time in which the prompt would be computed.
_SHARE_MAX: Final = 0.5
_WAIT_MAX_S: Final = 1.0


class HandOver:
    """For all instances."""

    def __init__(self, prefix_index: PrefixIndex, instances: Instances) -> None:
        self._prefix_index = prefix_index
        self._instances = instances
        self._added = asyncio.Event()

    def note_file(self) -> None:
        """Note that there is one file more."""
        self._added.set()
        self._added.clear()

    async def wait(self, lease: Lease) -> None:
        """Wait until a file has what another instance held, unless computing it is quicker."""
        prompt, content = lease.request.prompt, self._left_behind(lease)
        if prompt is None or content is None:
            return
        compute_s = content.tokens / lease.instance.rates.prefill_tps
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAIT_MAX_S, _SHARE_MAX * compute_s)):
                while not self._is_saved(lease, prompt, content):
                    await self._added.wait()

    def _left_behind(self, lease: Lease) -> SlotContent | None:
        """Return what a slot of an instance that drains holds of a conversation."""
        if not lease.is_continued:
            return None
        key = lease.upstream.cache_key
        runs = (one for one in self._prefix_index.runs_with_files() if one.cache_key == key)
        contents = (
            one.slot_map.content_of(lease.conversation) for one in filter(self._drains, runs)
        )
        return next((one for one in contents if one and one.tokens >= _TOKENS_MIN), None)

    def _drains(self, run: Run) -> bool:
        instance = self._instances.get(run.name)
        return not run.has_ended and (instance is None or not instance.in_service)

    def _is_saved(self, lease: Lease, prompt: Prompt, content: SlotContent) -> bool:
        found = self._prefix_index.files.find(lease.upstream.cache_key, prompt)
        return found is not None and len(found.file.fingerprint.blocks) >= len(content.blocks)
