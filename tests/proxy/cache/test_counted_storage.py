"""The operations of a storage are counted by model."""

from __future__ import annotations

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.save_policy import CountedStorage, OperationCounts, Transfer

DONE = Transfer(2000, 24_000_000, 0.25)


class Storage:
    """Saves all, by the limits nothing; its one file fails."""

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return False

    async def restore(self, _instance: str, _slot: int, _name: str, /) -> Transfer | None:
        return None

    async def look(self, _instance: str, /) -> None:
        return

    async def save(
        self, _instance: str, _slot: int, _tokens: int, _what: ConversationFingerprint, /
    ) -> Transfer | None:
        return DONE


async def test_each_operation_counts_for_the_model_of_its_instance() -> None:
    storage = CountedStorage()
    for instance in ("chat.0", "chat.1", "gone.0"):
        storage.add(instance, "chat", Storage())
    storage.forget("gone.0")
    for instance, done in (("chat.0", DONE), ("chat.1", DONE), ("gone.0", None)):
        assert await storage.save(instance, 0, 2000, ConversationFingerprint()) is done
    assert await storage.restore("chat.0", 0, "a") is None
    assert not storage.may_save("chat.0", 1)
    assert set(storage.counts) == {"chat"}
    counts = storage.counts["chat"]
    assert counts["save"] == OperationCounts(2, 0, 4000, 48_000_000, 0.5)
    assert counts["restore"] == OperationCounts(failures=1)
