"""Writes slots to files and fills slots from files, for the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from proxy.prompt_cache.fingerprint import ConversationFingerprint


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an engine wrote or read, and how long it computed nothing else meanwhile."""

    tokens: int
    size_bytes: int
    duration_s: float


class SlotFileStorage(Protocol):
    """The slot store. Nothing here raises for an engine or a disk that fails: that is logged."""

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        """Return whether the limits of the disk and of writes per hour let so much be saved now."""

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        """Have an engine write an idle slot; return once it has, or None where it did not.

        The file is verified and stored after that; then `Router.add_slot_file` is called with it,
        and `Router.remove_slot_files` with those that it replaces. It is dropped where the engine
        wrote another number of tokens than `tokens` or up to 2 fewer.
        """

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        """Fill an idle slot from a file, verified before; None where that failed.

        A file that is missing, altered or refused is removed from the router before this returns.
        """


class NoSlotFiles:
    """Keeps nothing on disk."""

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return False

    async def save(
        self, _instance: str, _slot: int, _tokens: int, _what: ConversationFingerprint, /
    ) -> Transfer | None:
        return None

    async def restore(self, _instance: str, _slot: int, _name: str, /) -> Transfer | None:
        return None


NO_SLOT_FILES: Final = NoSlotFiles()
