"""The results that comparisons make of measured values."""

from scripts.bench import decode_gaps, demand, device, router, shards, tiers, tiers_gaps
from scripts.bench.conversations import TurnResult
from scripts.bench.overhead_report import Figures, Target, result_of, targets_of


def test_a_total_is_judged_by_the_median_of_its_rounds() -> None:
    rounds = [
        {1: {"plain": 100.0, "corral": corral}, 8: {"plain": 100.0, "corral": 120.0}}
        for corral in (96.0, 90.0, 94.0)
    ]
    found = demand.result(rounds)
    assert found.missed == ["1 clients: 0.94 (0.90 to 0.96) of plain, at least 0.95"]
    assert [figure.base for figure in found.figures] == ["plain", "plain"]


def test_pauses_are_judged_by_the_median_of_the_rounds() -> None:
    def seen(gap_s: float) -> decode_gaps.Seen:
        return decode_gaps.Seen([*[0.03] * 97, gap_s, gap_s, gap_s], [5.0], 100)

    rounds = [
        {
            decode_gaps.USUAL: decode_gaps.figures(seen(0.8)),
            decode_gaps.PURE: decode_gaps.figures(seen(gap_s)),
        }
        for gap_s in (0.32, 0.48, 0.44)
    ]
    found = decode_gaps.result(rounds)
    assert found.missed == [
        "gap between two tokens, p99: 0.55 (0.40 to 0.60) of that without, at most 0.5"
    ]
    assert found.figures[0].values[decode_gaps.USUAL] == [800.0] * 3


def test_a_build_without_router_mode_is_named() -> None:
    values = {("mixed requests: failed or cut", ""): 1.0, ("mixed requests: all of them", "s"): 2.0}
    alone = router.result([{"corral": values}])
    assert [*alone.not_measured] == ["router mode"]
    assert alone.missed == ["no request of ours fails or is cut (1)"]
    both = router.result([{"corral": values, "router mode": values}])
    assert both.not_measured == {}
    assert {figure.name: figure.base for figure in both.figures} == {
        "mixed requests: failed or cut": "",
        "mixed requests: all of them": "router mode",
    }


def test_fronts_that_are_not_installed_are_named() -> None:
    corral, nginx = Figures(*[2.0] * 11), Figures(*[1.5] * 11)
    direct = Figures(1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
    runs = [{"direct": direct, "corral": corral, "nginx": nginx}]
    found = result_of(runs, [Target("added", 2.5, [3.0])])
    assert [*found.not_measured] == ["haproxy", "litellm", "smg"]
    assert found.missed == ["added: 3, at most 2.5"]
    of_core = next(figure for figure in found.figures if figure.name == "req/core-s at 32")
    assert of_core.values == {"direct": [], "corral": [2.0], "nginx": [1.5]}
    ratio = next(figure for figure in found.figures if figure.name == "added p50, corral times")
    assert ratio.values == {"direct": [], "corral": [1.0], "nginx": [2.0]}


def test_a_rate_is_enough_by_itself_or_beside_that_of_smg() -> None:
    direct = Figures(1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 0.0)

    def missed(json_per_core_s: float, of_smg: float) -> list[str]:
        corral, smg = (
            Figures(2.0, 2.0, 2.0, per_core_s, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
            for per_core_s in (json_per_core_s, of_smg)
        )
        targets = targets_of([{"direct": direct, "corral": corral, "smg": smg}])
        return [target.text for target in targets if not target.is_met]

    assert missed(4_600.0, 12_000.0) == []
    assert missed(4_400.0, 10_000.0) == []
    (text,) = missed(4_200.0, 10_000.0)
    assert text.startswith("req/core-s at 32, against smg: 0.42, at least 0.43, or req/core-s")


def test_an_answer_is_the_alphabet_or_wrong() -> None:
    text = "xyzabcdefghijklmnopqrstuvwxyzabc"[: device.CHECKED_TOKENS]
    assert device.is_alphabet(text)
    assert not device.is_alphabet(text[:-1])
    assert not device.is_alphabet(text.replace("m", "n"))


def test_an_estimate_that_does_not_come_true_is_missed() -> None:
    """seed 000: estimated_speedup"""
    true, promised = (shards.Round(10, 15, estimated, 4) for estimated in (1.5, 2.5))
    assert shards.result([true]).missed == []
    (missed,) = shards.result([promised]).missed
    assert missed == "0.60 (0.60 to 0.60) of the estimate, within 25 %"


def test_conversations_that_return_are_judged_by_their_tokens_and_first_tokens() -> None:
    cold = TurnResult(2000, 0, 1, 9.9, 10.0, 10.1, "")

    def found(cached: int, first_token_s: float) -> tiers.Conversation:
        return tiers.Conversation(
            [], [cold, TurnResult(2040 - cached, cached, 1, 0.1, first_token_s, 2, "")]
        )

    kept = tiers.result(
        [found(2000, 0.5)] * 9 + [found(1000, 6.0)], [tiers.Conversation([], [cold])]
    )
    assert kept.missed == []
    (share, late) = tiers.result([found(1700, 2.0)], [tiers.Conversation([], [cold])]).missed
    assert share == "return: 90% of the tokens from the tiers (85.0%)"
    assert late == "return: first token, mean, within 0.15 of cold (0.200, medians 0.200)"


def test_pauses_for_saves_are_judged_with_prompts_and_without() -> None:
    def seen(gap_s: float, saves: int) -> tiers_gaps.Seen:
        prompts = [tiers_gaps.Gap(10, 11)]
        long = [tiers_gaps.Gap(10.5, 11.5), tiers_gaps.Gap(20, 20 + gap_s)]
        steady = [tiers_gaps.Gap(at, at + 0.02) for at in range(30, 60)]
        return tiers_gaps.Seen([*long, *steady], prompts, saves)

    pair = {tiers_gaps.WITH.name: seen(0.04, 0), tiers_gaps.WITHOUT.name: seen(0.02, 0)}
    assert tiers_gaps.result([pair]).missed == [
        "gap between prompts, p99: 2.00 (2.00 to 2.00) of that without, at most 1.3",
        "gaps: slots were saved meanwhile ([0])",
    ]
