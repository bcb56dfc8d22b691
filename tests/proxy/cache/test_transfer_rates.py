from __future__ import annotations

import pytest

from proxy.cache.save_policy import Transfer, TransferRates


def test_before_the_first_transfer_a_gigabyte_per_second_is_assumed() -> None:
    assert TransferRates().duration_s(25e6) == pytest.approx(0.035)


def test_a_slow_disk_is_known_after_one_transfer() -> None:
    rates = TransferRates()
    rates.note(Transfer(tokens=1000, size_bytes=100_000_000, duration_s=2.0))
    assert 1.5 < rates.duration_s(100e6) < 2.5
    assert 0.7 < rates.duration_s(50e6) < 1.5


def test_what_each_transfer_takes_is_told_apart_from_its_bytes() -> None:
    rates = TransferRates()
    for size_bytes in (1_000_000, 40_000_000, 5_000_000, 80_000_000, 10_000_000) * 4:
        rates.note(Transfer(1, size_bytes, 0.004 + size_bytes / 2e9))
    assert rates.duration_s(0) == pytest.approx(0.004, rel=0.1)
    assert rates.duration_s(200e6) == pytest.approx(0.104, rel=0.1)
