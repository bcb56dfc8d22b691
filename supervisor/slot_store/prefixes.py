"""Slot files of prefixes that conversations share. Pure."""

from __future__ import annotations

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.prompt_cache.prompt import BLOCK_TOKENS
from proxy.prompt_cache.slot_file import SlotFile
from supervisor.slot_store.catalogue import Catalogue, CataloguedFile
from supervisor.slot_store.replacement import missing


def find_prefix(
    catalogue: Catalogue, cache_key: str, blocks: tuple[int, ...], tokens_min: int
) -> CataloguedFile | None:
    """Return a file of a prefix: it lacks few tokens, and has few more."""
    wanted, few = ConversationFingerprint((), blocks), tokens_min // BLOCK_TOKENS
    for one in prefixes(catalogue, cache_key):
        its = one.file.fingerprint
        if max(missing(wanted, its), missing(its, wanted)) < few:
            return one
    return None


def prefixes(catalogue: Catalogue, cache_key: str) -> list[CataloguedFile]:
    """Return the files of no conversation that begin conversations, the last used first."""
    return [one for one in catalogue.anonymous(cache_key) if is_prefix(one.file)]


def is_prefix(file: SlotFile) -> bool:
    """Return whether a file is of no conversation, and others can begin with it."""
    of_none = file.fingerprint.blocks and not file.fingerprint.turn_hashes
    return bool(of_none) and not file.is_recurrent
