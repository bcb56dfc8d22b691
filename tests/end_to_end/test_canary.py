"""Concurrent conversations on engines that swap caches all the time do not mix."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.canary import EXACT, run


def test_no_conversation_leaks_into_another(tiny_model: Path) -> None:
    found = run(EXACT, tiny_model, clients=8, turns=80)
    assert found.turns == 80
    assert found.cached > 0.3
    assert found.leaks == []
    assert found.differences == []
