"""The memory of conversations that a cache has evicted."""

from __future__ import annotations

from proxy.cache.host_cache import EvictedConversations


def test_at_most_4096_are_remembered_and_the_oldest_go_first() -> None:
    evicted = EvictedConversations()
    for number in range(5000):
        evicted.add(number, 2.0)
    assert evicted.size_bytes == 2.0 * 4096
    assert [number in evicted for number in (0, 903, 904, 4999)] == [False, False, True, True]
