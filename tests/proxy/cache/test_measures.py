from __future__ import annotations

from proxy.cache.save_policy import SlotFileMeasures, Transfer


def turn(measures: SlotFileMeasures, at_s: float, found: int) -> None:
    measures.note_turn(1, at_s, at_s, tokens=1000, found=found)


def test_saves_and_restores_are_measured_apart() -> None:
    measures = SlotFileMeasures()
    measures.saves.note(Transfer(1000, 10_000_000, 0.5))
    measures.restores.note(Transfer(1000, 10_000_000, 0.01))
    assert measures.saves.duration_s(10e6) > 0.3
    assert measures.restores.duration_s(10e6) < 0.05


def test_a_return_shows_whether_its_cache_was_lost() -> None:
    measures = SlotFileMeasures()
    turn(measures, 0.0, found=0)
    assert measures.loss_p == 0.5, "a first turn has lost nothing"
    for at_s in range(1, 20):
        turn(measures, at_s, found=990)
    assert measures.loss_p == 0.05
    for at_s in range(20, 40):
        turn(measures, at_s, found=350)
    assert 0.6 < measures.loss_p < 0.7
    assert measures.returns.return_p(1, 40) > 0.8


def test_what_engines_find_nothing_of_is_worth_little() -> None:
    measures = SlotFileMeasures()
    measures.note_use(1000, 1400)
    assert measures.use == 1
    for _ in range(20):
        measures.note_use(1000, 0)
    assert measures.use == 0.02
    measures.note_use(1000, 1000)
    assert measures.use > 0.3
