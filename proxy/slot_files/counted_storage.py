"""Counts what a storage of slot files does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.slot_files.storage import SlotFileStorage, Transfer

Operation = Literal["save", "restore"]


@dataclass(slots=True)
class OperationCounts:
    """Since the start; `failures` are those that gave nothing."""

    done: int = 0
    failures: int = 0
    tokens: int = 0
    size_bytes: int = 0
    duration_s: float = 0.0

    def note(self, transfer: Transfer | None) -> None:
        if transfer is None:
            self.failures += 1
            return
        self.done += 1
        self.tokens += transfer.tokens
        self.size_bytes += transfer.size_bytes
        self.duration_s += transfer.duration_s


ModelCounts = Mapping[Operation, OperationCounts]


def no_counts() -> ModelCounts:
    return {"save": OperationCounts(), "restore": OperationCounts()}


class CountedStorage:
    """A storage, with counts by model.

    Args:
        storage: The storage.
        model_of: Returns the model of an instance; None of one that is gone.
    """

    def __init__(self, storage: SlotFileStorage, model_of: Callable[[str], str | None]) -> None:
        self._storage = storage
        self._model_of = model_of
        self._counts: dict[str, ModelCounts] = {}

    @property
    def counts(self) -> Mapping[str, ModelCounts]:
        """By model; those without any are missing."""
        return self._counts

    def may_save(self, instance: str, size_bytes: float, /) -> bool:
        return self._storage.may_save(instance, size_bytes)

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        done = await self._storage.save(instance, id_slot, tokens, fingerprint)
        self._note("save", instance, done)
        return done

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        done = await self._storage.restore(instance, id_slot, name)
        self._note("restore", instance, done)
        return done

    def _note(self, operation: Operation, instance: str, transfer: Transfer | None) -> None:
        if model := self._model_of(instance):
            self._counts.setdefault(model, no_counts())[operation].note(transfer)
