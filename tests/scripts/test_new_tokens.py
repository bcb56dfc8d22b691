"""Which tokens of a run a cache that forgets nothing computes."""

from collections.abc import Sequence

from scripts.bench.new_tokens import TurnTokens, distinct_tokens, new_tokens

SYSTEM = (1, 2, 3)


def turn(began_at_s: float, prompt: Sequence[int], answer: Sequence[int] = ()) -> TurnTokens:
    return TurnTokens(began_at_s, began_at_s + 1, len(prompt), [*prompt, *answer])


def test_only_tokens_after_a_computed_prefix_are_new() -> None:
    first = turn(0, [*SYSTEM, 4], [5, 6])
    assert new_tokens([first]) == 4
    assert new_tokens([first, turn(1, [*SYSTEM, 4, 5, 6, 7])]) == 4 + 1
    assert new_tokens([first, turn(1, [*SYSTEM, 8, 9])]) == 4 + 2


def test_a_prompt_that_is_not_computed_yet_saves_nothing() -> None:
    turns = [turn(0.5, [*SYSTEM, 8]), turn(0, [*SYSTEM, 4])]
    assert new_tokens(turns) == 8
    assert distinct_tokens(turns) == 4 + 1


def test_the_last_token_of_a_prompt_is_always_new() -> None:
    assert new_tokens([turn(0, SYSTEM, [4]), turn(1, SYSTEM)]) == 3 + 1
