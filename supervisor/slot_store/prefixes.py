"""Slot files of prefixes that conversations share. Pure."""

from __future__ import annotations

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.prompt_cache.prompt import BLOCK_TOKENS
from supervisor.slot_store.catalogue import Catalogue
from supervisor.slot_store.replacement import missing


def find_prefix(
    catalogue: Catalogue, cache_key: str, blocks: tuple[int, ...], tokens_min: int
) -> str | None:
    """Return the name of a file of a prefix: it lacks few tokens, and has few more."""
    wanted, few = ConversationFingerprint((), blocks), tokens_min // BLOCK_TOKENS
    for one in catalogue.anonymous(cache_key):
        its = one.file.fingerprint
        if its.blocks and max(missing(wanted, its), missing(its, wanted)) < few:
            return one.manifest.name
    return None
