from __future__ import annotations

from proxy.router.estimator import Correction


def test_a_few_estimates_correct_nothing() -> None:
    correction = Correction()
    for _ in range(7):
        correction.note(0, 1.0, 1.5)
    assert correction.factor(0) == 1.0


def test_estimates_beside_as_many_others_are_corrected_within_bounds() -> None:
    correction = Correction()
    for _ in range(9):
        correction.note(5, 1.0, 1.44)
        correction.note(1, 1.0, 50.0)
        correction.note(20, 0.0, 1.0)
    assert correction.factor(7) == 1.2
    assert correction.factor(1) == 1.4
    assert correction.factor(0) == 1.0
    assert correction.factor(100) == 1.0
