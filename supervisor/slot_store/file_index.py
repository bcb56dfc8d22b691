"""An index in memory of a daemon's slot files, so that no decision reads the disk.

All manifests are read once; then all code that stores or deletes a file updates the index, which
informs the router. A file that another program deleted stays listed until an engine should read it:
a miss.

The index also decides which files a new one replaces. A file of a later turn replaces that of an
earlier turn; a branch of the conversation that differs by more than a short answer is kept. A
conversation is identified by its last turns. After many more turns, or a restart, it is identified
by its first prompt; then the new file must hold most of the old one, in case that belongs to
another conversation. Files of no conversation replace each other only if their prompts are nearly
the same: the shorter of two prefixes is read more quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile, decode_fingerprint
from proxy.cache.prompt import BLOCK_TOKENS
from supervisor.slot_store.manifest import CacheKey, Manifest

if TYPE_CHECKING:
    from proxy.router.router import Router

_Key = tuple[str, int]


class NameIndex:
    """Maps keys to the names that were added with them."""

    def __init__(self) -> None:
        self._names: defaultdict[_Key, set[str]] = defaultdict(set)

    def add(self, keys: Iterable[_Key], name: str) -> None:
        for key in keys:
            self._names[key].add(name)

    def remove(self, keys: Iterable[_Key], name: str) -> None:
        for key in keys:
            self._names[key].discard(name)
            if not self._names[key]:
                del self._names[key]

    def find(self, keys: Iterable[_Key]) -> list[str]:
        return sorted({name for key in keys for name in self._names.get(key, ())})


def replaced_files(new: SlotFile, others: Iterable[SlotFile], tokens_min: int) -> list[str]:
    """Return the names of the files that a new one replaces.

    `others` belong to its conversation, or to none if it has none. Prompts that differ by less than
    `tokens_min` count as the same.
    """
    return [
        other.name
        for other in others
        if other.name != new.name and _replaces(new, other, tokens_min)
    ]


def _replaces(new: SlotFile, old: SlotFile, tokens_min: int) -> bool:
    ours, its = new.fingerprint, old.fingerprint
    most = tokens_min // BLOCK_TOKENS
    if count_missing_blocks(its, ours) >= most:
        return False
    if not ours.turn_hashes:
        is_other = new.is_recurrent and ours.beginning != its.beginning
        return not is_other and count_missing_blocks(ours, its) < most
    if set(ours.turn_hashes) & set(its.turn_hashes):
        return True
    answer = old.tokens - BLOCK_TOKENS * len(its.blocks)
    return not old.is_recurrent and answer < max(tokens_min, old.tokens // 2)


def count_missing_blocks(
    fingerprint: ConversationFingerprint, other: ConversationFingerprint
) -> int:
    """Return how many blocks of a prompt are not in its common prefix with another."""
    return len(fingerprint.blocks) - shared_blocks(fingerprint.blocks, other.blocks)


def shared_blocks(ours: Sequence[int], its: Sequence[int]) -> int:
    """Return how many blocks two prompts share; a block's hash includes all blocks before it."""
    low, high = 0, min(len(ours), len(its))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == its[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


_KEY_DIGITS: Final = 32
# The cache lacks the last token of an answer, and its end token.
TOKENS_AWAY_MAX: Final = 2
# A file is written again for more new tokens than this for each GiB: 4 GiB, which take 4 s, for
# 1 024 tokens, which an 8B model on a GPU computes in a second.
_REWRITE_TOKENS: Final = 256
# How many unidentified files are compared token by token.
_COMPARED_MAX: Final = 16
# Prefixes per cache key; the least recently used are deleted first.
_PREFIXES_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class CataloguedFile:
    manifest: Manifest  # without the text of the fingerprint, which is in `file`
    file: SlotFile
    # Tokens that this daemon restored; they lose half their weight per day.
    restored_tokens: float = 0.0


class Catalogue:
    """The files of all models. Only the event loop's thread may use it."""

    def __init__(self, listener: Router) -> None:
        self._listener = listener
        self._files: dict[str, CataloguedFile] = {}
        self.size_bytes = 0  # of all files
        self._by_turn = NameIndex()
        self._by_end = NameIndex()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> CataloguedFile | None:
        return self._files.get(name)

    def files(self) -> Collection[CataloguedFile]:
        return self._files.values()

    def add(self, manifest: Manifest, *, is_readable: bool = True) -> CataloguedFile:
        """Add or update a file; an unreadable file fits no engine."""
        entry, name = _catalogue_entry(manifest, is_readable=is_readable), manifest.name
        self._forget(name)
        self._files[name] = entry
        self.size_bytes += manifest.size_bytes
        self._by_turn.add(_turns(entry.file), name)
        self._by_end.add(_end(entry.file), name)
        self._listener.add_slot_file(entry.file)
        return entry

    def find_key_changes(self, is_readable: Callable[[Manifest], bool]) -> list[str]:
        """Return the names of files that became readable or unreadable."""
        return [
            name
            for name, entry in self._files.items()
            if entry.file.cache_key
            != _cache_key(entry.manifest, is_readable=is_readable(entry.manifest))
        ]

    def remove(self, names: Iterable[str]) -> list[Manifest]:
        """Forget files; return the manifests of those that were listed."""
        gone = [entry.manifest for name in names if (entry := self._forget(name))]
        if gone:
            self._listener.remove_slot_files([entry.name for entry in gone])
        return gone

    def remove_all(self, cache_key: str) -> None:
        """Forget the files of a cache key; they stay on disk until others need the space."""
        self.remove(
            [name for name, entry in self._files.items() if entry.file.cache_key == cache_key]
        )

    def note_use(self, name: str, now: datetime) -> None:
        if entry := self._files.get(name):
            days = (now - entry.manifest.used_at) / timedelta(days=1)
            self._files[name] = replace(
                entry,
                manifest=replace(entry.manifest, used_at=now),
                restored_tokens=entry.restored_tokens * 0.5 ** max(0.0, days) + entry.file.tokens,
            )

    def holds(self, cache_key: str, tokens: int, fingerprint: ConversationFingerprint) -> bool:
        """Return whether a file has these tokens of a conversation, or all of another prompt.

        A large file is not written again for few tokens; see `_REWRITE_TOKENS`.
        An unidentified slot with as many tokens as a prefix file is the slot of that file.
        """
        if fingerprint.turn_hashes:
            return any(
                _has_enough(entry.file, tokens, fingerprint)
                for entry in self.files_of_conversation(cache_key, fingerprint)
            )
        if not fingerprint.blocks:
            return any(
                entry.file.fingerprint.blocks and entry.file.tokens == tokens
                for entry in self.anonymous(cache_key)
            )
        return any(
            entry.file.cache_key == cache_key
            and (not entry.file.is_recurrent or entry.file.tokens == tokens)
            and not count_missing_blocks(fingerprint, entry.file.fingerprint)
            for entry in self._files.values()
        )

    def find_replaced(self, new: SlotFile, tokens_min: int) -> list[str]:
        its = new.fingerprint
        if its.turn_hashes:
            names = {
                *self._by_turn.find((new.cache_key, turn_hash) for turn_hash in its.turn_hashes),
                *self._by_end.find((new.cache_key, block) for block in its.blocks),
            }
            return replaced_files(
                new, [self._files[name].file for name in sorted(names)], tokens_min
            )
        if not its.blocks:
            return []
        found = self.anonymous(new.cache_key)
        prefixes = [entry.file for entry in found if entry.file.fingerprint.blocks]
        surplus = [file.name for file in prefixes[_PREFIXES_MAX:]]
        return [*surplus, *replaced_files(new, prefixes, tokens_min)]

    def files_of_conversation(
        self, cache_key: str, fingerprint: ConversationFingerprint
    ) -> list[CataloguedFile]:
        names = self._by_turn.find((cache_key, turn_hash) for turn_hash in fingerprint.turn_hashes)
        return [self._files[name] for name in names]

    def latest_of_turns(self, cache_key: str, turn_hashes: Sequence[int]) -> CataloguedFile | None:
        """Return the file of the latest of these turns, oldest first, from which it continues."""
        for turn_hash in reversed(turn_hashes):
            names = self._by_turn.find([(cache_key, turn_hash)])
            found = [
                entry
                for entry in map(self._files.__getitem__, names)
                if not entry.file.is_recurrent
                or entry.file.fingerprint.turn_hashes[-1] == turn_hash
            ]
            if found:
                return max(found, key=lambda entry: entry.file.tokens)
        return None

    def anonymous(self, cache_key: str) -> list[CataloguedFile]:
        """Return the files of no conversation, the latest used first."""
        found = (
            entry
            for entry in self._files.values()
            if entry.file.cache_key == cache_key and not entry.file.fingerprint.turn_hashes
        )
        return sorted(found, key=lambda entry: entry.manifest.used_at, reverse=True)

    def unidentified(self, manifest: Manifest) -> list[Manifest]:
        """Return at most 16 files of the same engines without fingerprints, latest used first."""
        found = self.anonymous(key_digest(manifest.model, manifest.identity))
        unidentified = (entry.manifest for entry in found if not entry.file.fingerprint.blocks)
        return list(islice(unidentified, _COMPARED_MAX))

    def _forget(self, name: str) -> CataloguedFile | None:
        if entry := self._files.pop(name, None):
            self.size_bytes -= entry.manifest.size_bytes
            self._by_turn.remove(_turns(entry.file), name)
            self._by_end.remove(_end(entry.file), name)
        return entry


def _has_enough(file: SlotFile, tokens: int, fingerprint: ConversationFingerprint) -> bool:
    """Return whether writing the slot of its conversation again would gain next to nothing."""
    its, more = file.fingerprint, tokens - file.tokens
    if its == fingerprint:
        return more <= TOKENS_AWAY_MAX
    is_continued = its.scales == fingerprint.scales and not count_missing_blocks(its, fingerprint)
    if not is_continued or its.turn_hashes[-1] not in fingerprint.turn_hashes:
        return False
    return 0 <= more <= _REWRITE_TOKENS * file.size_bytes / 1024**3


def _catalogue_entry(manifest: Manifest, *, is_readable: bool) -> CataloguedFile:
    file = SlotFile(
        name=manifest.name,
        cache_key=_cache_key(manifest, is_readable=is_readable),
        tokens=manifest.tokens,
        size_bytes=manifest.size_bytes,
        fingerprint=decode_fingerprint(manifest.fingerprint),
        is_recurrent=manifest.identity.is_all_or_nothing,
    )
    return CataloguedFile(replace(manifest, fingerprint=""), file)


def _turns(file: SlotFile) -> list[tuple[str, int]]:
    return [(file.cache_key, turn_hash) for turn_hash in file.fingerprint.turn_hashes]


def _end(file: SlotFile) -> list[tuple[str, int]]:
    its = file.fingerprint
    return [(file.cache_key, block) for block in its.blocks[-1:] if its.turn_hashes]


def _cache_key(manifest: Manifest, *, is_readable: bool) -> str:
    found = key_digest(manifest.model, manifest.identity)
    return found if is_readable else f"{found} {manifest.key_id}"


@lru_cache(maxsize=64)
def key_digest(model: str, key: CacheKey) -> str:
    """Return a text that is equal for the engines that can use each other's slot files."""
    shared_key = key.without_slots if key.slots is not None else key
    text = json.dumps([model, shared_key.members], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


def find_prefix(
    catalogue: Catalogue, cache_key: str, blocks: tuple[int, ...], tokens_min: int
) -> CataloguedFile | None:
    """Return a file of nearly this prefix: it lacks, and adds, fewer than `tokens_min` tokens."""
    wanted, few = ConversationFingerprint((), blocks), tokens_min // BLOCK_TOKENS
    found = (entry for entry in catalogue.anonymous(cache_key) if not entry.file.is_recurrent)
    for entry in filter(lambda entry: is_prefix(entry.file), found):
        its = entry.file.fingerprint
        if max(count_missing_blocks(wanted, its), count_missing_blocks(its, wanted)) < few:
            return entry
    return None


def is_prefix(file: SlotFile) -> bool:
    """Return whether a file belongs to no conversation, and conversations can begin with it."""
    its = file.fingerprint
    is_anonymous = its.blocks and not its.turn_hashes
    return bool(is_anonymous and (its.beginning or not file.is_recurrent))
