"""Processor time is shared by slots and by how long they were held."""

from __future__ import annotations

from supervisor.records.usage_recorder import CpuShares


def test_time_is_shared_among_those_that_held_slots() -> None:
    shares = CpuShares()
    shares.read(2.0, 10.0)  # loading
    shares.begin("a", 1, 10.0)
    shares.begin("b", 1, 12.0)
    shares.read(10.0, 14.0)  # a held 4 s, b held 2 s
    assert round(shares.end("a"), 6) == round(8.0 * 4 / 6, 6)
    shares.begin("c", 2, 14.0)
    shares.read(13.0, 15.0)  # b one slot, c two
    assert round(shares.end("b"), 6) == round(8.0 * 2 / 6 + 1.0, 6)
    assert round(shares.end("c"), 6) == 2.0
    assert shares.own_s == 2.0
    shares.read(14.0, 20.0)
    assert (shares.own_s, shares.is_idle) == (3.0, True)
