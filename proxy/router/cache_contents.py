"""What the engines of a model are believed to hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.prompt_cache.host_cache import HostCache
from proxy.prompt_cache.index import PrefixIndex
from proxy.upstream.upstream import Upstream


@dataclass(slots=True)
class CacheContents:
    """Of all instances of a model on this machine.

    Attributes:
        slots: That instances have.
        conversations: In slots.
        tokens: Of those.
        host_cache_bytes: That engines may keep of prompts that are in no slot; infinity: no limit.
        copied_conversations: That host caches are believed to hold; None where that is not known.
        copied_tokens: Of those, with older copies of some.
        copied_bytes: The same.
    """

    slots: int = 0
    conversations: int = 0
    tokens: int = 0
    host_cache_bytes: float = 0.0
    copied_conversations: int | None = None
    copied_tokens: int = 0
    copied_bytes: float = 0.0

    def add_copies(self, host_cache: HostCache) -> None:
        self.copied_conversations = (self.copied_conversations or 0) + host_cache.conversations
        self.copied_tokens += sum(host_cache.copied_tokens)
        self.copied_bytes += host_cache.used_bytes


def cache_contents(
    upstreams: Iterable[Upstream], prefix_index: PrefixIndex
) -> dict[str, CacheContents]:
    """Return what is held, by model."""
    found: dict[str, CacheContents] = {}
    for upstream in upstreams:
        run = prefix_index.run(upstream.name)
        if run is None or upstream.node:
            continue
        held = found.setdefault(upstream.model, CacheContents())
        held.slots += upstream.slots
        held.conversations += run.slot_map.conversations
        held.tokens += run.slot_map.tokens
        held.host_cache_bytes += upstream.host_cache_bytes
        if run.host_cache:
            held.add_copies(run.host_cache)
    return found
