"""Answers to captured prompts with prompt rules and without."""

from __future__ import annotations

from proxy.upstream.endpoint_kinds import EndpointKind
from scripts.bench.prompt_rules import Comparison, compare, summary, variants

SYSTEM = "You work in\nDirectory: /home/ann/one\nBe brief."


def body(system: str) -> dict[str, object]:
    user = {"role": "user", "content": "Which directory?"}
    return {"messages": [{"role": "system", "content": system}, user]}


def test_a_prompt_is_compared_with_its_rules_and_with_other_values() -> None:
    found = variants(EndpointKind.CHAT, body(SYSTEM), ("move:path", "move:date"))
    assert found == (
        body("You work in\nBe brief.\nDirectory: /home/ann/one"),
        body("You work in\nDirectory: /home/ann/ona\nBe brief."),
    )
    assert variants(EndpointKind.CHAT, body("Be brief."), ("move:path",)) is None


def test_answers_are_compared_token_by_token() -> None:
    captured = [{token: -0.5 - token for token in range(12)}, {7: -0.1, 8: -3.0}]
    moved = [{token: -1.0 - token for token in range(1, 13)}, {7: -0.3, 8: -2.0}]
    found = compare(captured, moved)
    assert found.is_equal == [False, True]
    assert found.lost == [12.5, 0.3 - 0.1]  # it is below all that the engine lists
    assert found.overlap == 0.9


def test_the_summary_has_the_means_of_all_prompts() -> None:
    same, other = Comparison([True, True], [0.0, 0.0], 1.0), Comparison([True, False], [0, 1], 0.5)
    figures = summary([(same, same), (other, same)]).figures
    means = {figure.name: [*figure.values.values()] for figure in figures}
    assert means["same answer"] == [[0.5], [1.0]]
    assert means["same first token"] == [[1.0], [1.0]]
    assert means["same of the ten most likely first tokens"] == [[0.75], [1.0]]
    assert means["log probability that a token lost"] == [[0.25], [0.0]]
