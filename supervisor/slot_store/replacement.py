"""Which slot files a new one replaces. Pure.

A file of a later turn replaces that of an earlier one; a branch of the conversation that differs in
more than a short answer is kept beside it. A conversation is known by its last turns; after more of
them, or a restart, by its first prompt: then the new file must hold most of the old one, in case it
is of another conversation. Of what belongs to no conversation, only files of nearly the same prompt
replace each other: of two prefixes, the shorter is read more quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.prompt_cache.prompt import BLOCK_TOKENS
from proxy.prompt_cache.slot_file import SlotFile


def replaced_by(new: SlotFile, others: Iterable[SlotFile], tokens_min: int) -> list[str]:
    """Return the names of files that a new one replaces, of those of its conversation or of none.

    Two are of the same prompt if they differ by less than `tokens_min`.
    """
    return [one.name for one in others if one.name != new.name and _replaces(new, one, tokens_min)]


def _replaces(new: SlotFile, old: SlotFile, tokens_min: int) -> bool:
    ours, its = new.fingerprint, old.fingerprint
    most = tokens_min // BLOCK_TOKENS
    if missing(its, ours) >= most:
        return False
    if not ours.turn_hashes:
        return missing(ours, its) < most
    if set(ours.turn_hashes) & set(its.turn_hashes):
        return True
    answer = old.tokens - BLOCK_TOKENS * len(its.blocks)
    return not old.is_recurrent and answer < max(tokens_min, old.tokens // 2)


def missing(one: ConversationFingerprint, other: ConversationFingerprint) -> int:
    """Return how many blocks of a prompt another does not begin with."""
    return len(one.blocks) - shared_blocks(one.blocks, other.blocks)


def shared_blocks(ours: Sequence[int], its: Sequence[int]) -> int:
    """Return how many blocks two prompts share; the hash of each includes all before it."""
    low, high = 0, min(len(ours), len(its))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == its[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
