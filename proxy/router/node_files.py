"""Takes slot files from other machines, if that is faster than computing the prompt.

A front that sends a conversation to another machine than before names the process that has it. The
file of the conversation is copied from there before the request gets its slot, and restored like
any other. If anything fails or takes too long, the prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from attrs import define, field

from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import BLOCK_TOKENS
from proxy.cache.save_policy import pays_to_restore
from proxy.cache.shared_prefixes import BEGINNING_BLOCKS_MIN
from proxy.router.lease import Lease

# The longest wait, and its share of the time to compute the prompt.
_WAIT_MAX_S: Final = 30.0
_SHARE_MAX: Final = 0.5


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A slot file of another machine."""

    holder: str  # The process that has it.
    cache_key: str  # Engines with this key can restore it.
    manifest: str
    tokens: int
    size_bytes: int
    transfer_s: float  # How long it takes to copy it, by earlier copies.


class NodeFileSource(Protocol):
    """The files of all nodes. The methods log failures instead of raising."""

    async def find(
        self, holder: str, cache_key: str, turn_hashes: Sequence[int], /
    ) -> NodeFile | None:
        """Return the file that has most of a conversation, the latest turn last."""

    async def take(self, file: NodeFile, /) -> bool:
        """Copy a file; then the router knows it."""


@define(eq=False, slots=False)
class NodeFileTaker:
    _prefix_index: PrefixIndex
    _source: NodeFileSource | None = field(default=None, init=False)

    def connect(self, source: NodeFileSource) -> None:
        self._source = source

    async def take(self, lease: Lease) -> None:
        """Copy the file of a lease's conversation, if another machine has it and that pays."""
        request, upstream, index = lease.request, lease.upstream, self._prefix_index
        prompt, holder = request.prompt, request.holder or lease.holder
        if not (self._source and holder and prompt):
            return
        known_blocks = index.available_blocks(upstream, prompt)
        missing = len(prompt.blocks) - known_blocks
        if missing < BEGINNING_BLOCKS_MIN:
            return
        limit_s = _SHARE_MAX * missing * BLOCK_TOKENS / lease.instance.rates.prefill_tps
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAIT_MAX_S, limit_s)):
                file = await self._source.find(holder, upstream.cache_key, prompt.turn_hashes)
                if file and self.pays(file, known_blocks * BLOCK_TOKENS, file.transfer_s):
                    await self._source.take(file)

    def pays(self, file: NodeFile, known_tokens: int, transfer_s: float = 0.0) -> bool:
        """Return whether to restore a file is faster than to compute its tokens.

        `transfer_s`: how long a request waits for the copy; for a file that is offered, none does.
        """
        files = self._prefix_index.files
        cost_tokens = files.cost_tokens(file.cache_key, file.size_bytes, transfer_s)
        return pays_to_restore(file.tokens - known_tokens, cost_tokens)
