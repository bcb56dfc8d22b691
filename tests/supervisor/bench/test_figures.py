import math
import random
from collections.abc import Callable

import pytest

from supervisor.bench.figures import (
    AMOUNT,
    NO_DIFFERENCE,
    RATE,
    TIME,
    TOO_FEW,
    Words,
    compare,
    compare_unpaired,
    requests_to_go,
    spread,
    t_quantile,
)

_RUNS = 1000


def _normal(chance: random.Random, _position: float) -> float:
    return chance.gauss(0, 0.02)


def _heavy_tailed(chance: random.Random, _position: float) -> float:
    """Student's t of 2 degrees of freedom: rare values are tens of times the usual ones."""
    scale = math.sqrt((chance.gauss(0, 1) ** 2 + chance.gauss(0, 1) ** 2) / 2)
    return 0.02 * chance.gauss(0, 1) / scale


def _with_outliers(chance: random.Random, _position: float) -> float:
    return chance.gauss(0, 0.02) - (math.log(2) if chance.random() < 0.1 else 0)


def _drifting(chance: random.Random, position: float) -> float:
    """The machine becomes 10 % slower from the first value to the last."""
    return chance.gauss(0, 0.02) - 0.1 * position


Noise = Callable[[random.Random, float], float]
NOISES = [_normal, _heavy_tailed, _with_outliers, _drifting]


def _run(
    noise: Noise, chance: random.Random, *, rounds: int, ratio: float = 1.0
) -> tuple[list[float], list[float]]:
    """Measure A B A B …, the second `ratio` times as fast."""
    values = [100 * math.exp(noise(chance, i / (2 * rounds))) for i in range(2 * rounds)]
    return values[::2], [value * ratio for value in values[1::2]]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_identical_variants_show_no_difference_in_19_of_20_runs(noise: Noise, rounds: int) -> None:
    chance = random.Random(rounds)
    false = sum(
        compare(*_run(noise, chance, rounds=rounds), words=RATE).is_different for _ in range(_RUNS)
    )
    assert false <= _RUNS / 20


def test_a_tenth_is_found_in_5_rounds_with_noise_of_2_percent() -> None:
    chance = random.Random(1)
    found = [compare(*_run(_normal, chance, rounds=5, ratio=1.1), words=RATE) for _ in range(_RUNS)]
    assert sum(each.is_different for each in found) >= 0.9 * _RUNS
    assert sum(each.low <= 1.1 <= each.high for each in found) >= 0.93 * _RUNS


def test_a_rare_outlier_makes_no_difference() -> None:
    assert not compare([100, 101, 99, 100, 50], [100, 99, 101, 102, 100], words=RATE).is_different


@pytest.mark.parametrize(
    ("other", "words", "verdict"),
    [
        ([140, 139, 150, 141, 135], RATE, "1.4 × faster (1.3–1.5)"),
        ([80, 85, 78, 90, 79], RATE, "1.2 × slower (1.1–1.3)"),
        ([140, 139, 150, 141, 135], TIME, "1.4 × longer (1.3–1.5)"),
        ([80, 85, 78, 90, 79], TIME, "1.2 × shorter (1.1–1.3)"),
        ([80, 85, 78, 90, 79], AMOUNT, "1.2 × less (1.1–1.3)"),
        ([130, 131, 129, 130, 132], AMOUNT, "1.30 × more (1.29–1.30)"),
        ([2000, 2400, 1900, 2100, 2000], RATE, "21 × faster (19–23)"),
        ([104, 105, 103, 104, 106], RATE, "1.04 × faster (1.04–1.04)"),
        ([100, 102, 99, 101, 103], RATE, NO_DIFFERENCE),
        ([100.5, 101.5, 99.5, 100.5, 102.5], RATE, NO_DIFFERENCE),
        ([200, 202], RATE, TOO_FEW),
        ([], RATE, TOO_FEW),
    ],
)
def test_verdicts(other: list[float], words: Words, verdict: str) -> None:
    assert compare([100, 101, 99, 100, 102], other, words=words).verdict == verdict


def test_the_interval_never_reads_as_if_it_held_1() -> None:
    found = compare([100.0] * 6, [101.5, 101.1, 102.2, 100.7, 102.6, 101.9], words=RATE)
    assert found.is_different
    assert "(1.0–" not in found.verdict
    assert "(1.00–" not in found.verdict


def test_a_ratio_is_better_or_worse_by_its_figure() -> None:
    faster = compare([100] * 3, [200] * 3, words=RATE)
    assert faster.is_better(RATE)
    assert not faster.is_better(TIME)
    assert not compare([100] * 3, [100] * 3, words=RATE).is_better(RATE)


def test_pairs_without_a_ratio_are_left_out() -> None:
    found = compare([0, 100, 100, 100, math.nan], [50, 200, 200, 200, 200, 7], words=RATE)
    assert (found.count, round(found.ratio, 9)) == (3, 2)


def test_data_for_json_has_null_where_nothing_is_known() -> None:
    data = compare([], [], words=RATE).data()
    assert (data["ratio"], data["high"], data["is_different"]) == (None, None, False)


def test_spread() -> None:
    assert spread([3, 1, 10]) == (3, 1, 10)


Conversations = list[list[float]]


def _conversations(chance: random.Random, count: int, factor: float = 1) -> Conversations:
    """Requests of one conversation resemble each other; a few conversations are long."""
    return [
        [factor * math.exp(own + chance.gauss(0, 0.05)) for _ in range(chance.choice([1, 2, 9]))]
        for own in (chance.gauss(0, 0.3) for _ in range(count))
    ]


def test_identical_variants_of_a_trial_show_no_difference_in_19_of_20_runs() -> None:
    chance = random.Random(5)
    false = sum(
        compare_unpaired(
            _conversations(chance, 40), _conversations(chance, 10), words=TIME
        ).is_different
        for _ in range(_RUNS // 2)
    )
    assert false <= _RUNS / 40


def test_a_trial_finds_a_difference_after_the_predicted_number_of_requests() -> None:
    chance = random.Random(6)
    base, other = _conversations(chance, 60), _conversations(chance, 20, 1.05)
    to_go = requests_to_go(base, other)
    assert not compare_unpaired(base, other, words=TIME).is_different
    assert to_go is not None
    factor = 2 * to_go / sum(map(len, base + other))
    base, other = (
        _conversations(chance, int(60 * factor)),
        _conversations(chance, int(20 * factor), 1.05),
    )
    assert compare_unpaired(base, other, words=TIME).verdict.endswith(")")
    assert requests_to_go(base, other) == 0


def test_a_trial_of_few_conversations_claims_nothing() -> None:
    few = [[1.0, 1.0, 1.0]] * 4
    assert compare_unpaired(few, [[9.0]] * 50, words=TIME).verdict == TOO_FEW
    assert requests_to_go(few, [[9.0]] * 50) is None
    assert compare_unpaired([], [[0.0]], words=TIME).verdict == TOO_FEW


def test_an_estimate_of_requests_is_bounded() -> None:
    wide: Conversations = [[10.0**i] for i in range(6)]
    assert requests_to_go(wide, wide) == 100_000


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 9, 2.262), (0.99, 4, 4.604), (0.99, 30, 2.750)],
)
def test_quantiles_of_student(level: float, degrees: int, expected: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(expected, abs=0.001)
