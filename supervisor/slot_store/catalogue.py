"""Which slot files a daemon has, in memory, so that no decision reads the disk.

All manifests are read once; then whatever stores or deletes a file says so here, and the router is
told. A file that something else deleted stays listed until an engine is to read it: a miss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Final, Protocol

from proxy.prompt_cache.fingerprint import ConversationFingerprint, decode_fingerprint
from proxy.prompt_cache.slot_file import SlotFile
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.name_index import NameIndex
from supervisor.slot_store.replacement import missing, replaced_by

_KEY_DIGITS: Final = 32
# The last token of an answer is not in the cache, nor is the one that ends it.
TOKENS_AWAY_MAX: Final = 2
# Of files that nothing is known of, so many are compared token by token.
_COMPARED_MAX: Final = 16
# Of prefixes for engines with the same cache key; the least recently used go first.
_PREFIXES_MAX: Final = 16


class SlotFileListener(Protocol):
    """The part of proxy.router.router.Router that learns of slot files."""

    def add_slot_file(self, file: SlotFile, /) -> None:
        """Note that a KV cache is on disk."""

    def remove_slot_files(self, names: Iterable[str], /) -> None:
        """Note that slot files are gone."""


@dataclass(frozen=True, slots=True)
class CataloguedFile:
    """A slot file.

    Attributes:
        manifest: Without the text of its fingerprint, which `file` has.
        restored_tokens: By this daemon; they count half with each day.
    """

    manifest: Manifest
    file: SlotFile
    restored_tokens: float = 0.0


class Catalogue:
    """The files of all models; only for the event loop."""

    def __init__(self, listener: SlotFileListener) -> None:
        self._listener = listener
        self._files: dict[str, CataloguedFile] = {}
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
        """Add a file, or replace what is known of it; no engine fits one that is not readable."""
        one, name = _catalogued(manifest, is_readable=is_readable), manifest.name
        self._forget(name)
        self._files[name] = one
        self._by_turn.add(_turns(one.file), name)
        self._by_end.add(_end(one.file), name)
        self._listener.add_slot_file(one.file)
        return one

    def read_otherwise(self, is_readable: Callable[[Manifest], bool]) -> list[str]:
        """Return the files that became readable or unreadable."""
        return [
            name
            for name, one in self._files.items()
            if one.file.cache_key != _cache_key(one.manifest, is_readable=is_readable(one.manifest))
        ]

    def remove(self, names: Iterable[str]) -> list[Manifest]:
        """Forget files; return those that were known."""
        gone = [one.manifest for name in names if (one := self._forget(name))]
        if gone:
            self._listener.remove_slot_files([one.name for one in gone])
        return gone

    def remove_all(self, cache_key: str) -> None:
        """Forget the files of a cache key; they stay on the disk until others need the room."""
        self.remove([name for name, one in self._files.items() if one.file.cache_key == cache_key])

    def note_use(self, name: str, now: datetime) -> None:
        """Note that an engine restored a file."""
        if one := self._files.get(name):
            days = (now - one.manifest.used_at) / timedelta(days=1)
            self._files[name] = replace(
                one,
                manifest=replace(one.manifest, used_at=now),
                restored_tokens=one.restored_tokens * 0.5 ** max(0.0, days) + one.file.tokens,
            )

    def holds(self, cache_key: str, tokens: int, fingerprint: ConversationFingerprint) -> bool:
        """Return whether a file holds as much of a conversation, or all of a prompt of none.

        What nothing is known of, with the tokens of a prefix, is the slot that this was saved from.
        """
        if fingerprint.turn_hashes:
            return any(
                one.file.fingerprint == fingerprint and one.file.tokens >= tokens - TOKENS_AWAY_MAX
                for one in self.of_conversation(cache_key, fingerprint)
            )
        if not fingerprint.blocks:
            of_none = self.anonymous(cache_key)
            return any(one.file.fingerprint.blocks and one.file.tokens == tokens for one in of_none)
        return any(
            one.file.cache_key == cache_key
            and not one.file.is_recurrent
            and not missing(fingerprint, one.file.fingerprint)
            for one in self._files.values()
        )

    def replaced_by(self, new: SlotFile, tokens_min: int) -> list[str]:
        """Return the names of the files that a new one replaces."""
        its = new.fingerprint
        if its.turn_hashes:
            names = {
                *self._by_turn.find((new.cache_key, one) for one in its.turn_hashes),
                *self._by_end.find((new.cache_key, one) for one in its.blocks),
            }
            return replaced_by(new, [self._files[one].file for one in sorted(names)], tokens_min)
        if not its.blocks:
            return []
        found = self.anonymous(new.cache_key)
        prefixes = [one.file for one in found if one.file.fingerprint.blocks]
        surplus = [one.name for one in prefixes[_PREFIXES_MAX:]]
        return [*surplus, *replaced_by(new, prefixes, tokens_min)]

    def of_conversation(
        self, cache_key: str, fingerprint: ConversationFingerprint
    ) -> list[CataloguedFile]:
        """Return the files that have a turn of a conversation."""
        names = self._by_turn.find((cache_key, one) for one in fingerprint.turn_hashes)
        return [self._files[name] for name in names]

    def anonymous(self, cache_key: str) -> list[CataloguedFile]:
        """Return the files that belong to no conversation, the last used first."""
        found = (
            one
            for one in self._files.values()
            if one.file.cache_key == cache_key and not one.file.fingerprint.turn_hashes
        )
        return sorted(found, key=lambda one: one.manifest.used_at, reverse=True)

    def unknown(self, manifest: Manifest) -> list[Manifest]:
        """Return files of which only the tokens tell what they hold, for engines of a manifest."""
        found = self.anonymous(key_digest(manifest.model, manifest.identity))
        unknown = (one.manifest for one in found if not one.file.fingerprint.blocks)
        return list(islice(unknown, _COMPARED_MAX))

    def _forget(self, name: str) -> CataloguedFile | None:
        if one := self._files.pop(name, None):
            self._by_turn.remove(_turns(one.file), name)
            self._by_end.remove(_end(one.file), name)
        return one


def _catalogued(manifest: Manifest, *, is_readable: bool) -> CataloguedFile:
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
    return [(file.cache_key, one) for one in file.fingerprint.turn_hashes]


def _end(file: SlotFile) -> list[tuple[str, int]]:
    """Return the last block of a conversation's prompt."""
    its = file.fingerprint
    return [(file.cache_key, one) for one in its.blocks[-1:] if its.turn_hashes]


def _cache_key(manifest: Manifest, *, is_readable: bool) -> str:
    found = key_digest(manifest.model, manifest.identity)
    return found if is_readable else f"{found} {manifest.key_id}"


@lru_cache(maxsize=64)
def key_digest(model: str, key: CacheKey) -> str:
    """Return the same text for all engines of a model that can use each other's slot files."""
    one = key.without_slots if key.slots is not None else key
    text = json.dumps([model, asdict(one)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]
