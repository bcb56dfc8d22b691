"""No expression backtracks for longer than its text is: a client may write the text.

The steps of an expression are counted. That takes a hundred times as long as to match, so only
texts for which a match seems slow are counted; on a busy machine these are more.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from itertools import accumulate, permutations
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest
from support.backtracking import Backtracking, TooManySteps, Way
from support.growth import FACTOR, is_linear

import proxy
import supervisor

SIZE = 1_000
# Linear backtracking takes 8 times as many steps for a text of 8 times the length.
_GROWTH_MAX = 3 * FACTOR
_STEPS_MAX = 10_000_000
_SAMPLES_MAX = 8


def expressions(package: ModuleType) -> Iterator[tuple[str, re.Pattern[Any], Way]]:
    """Yield every expression that a module of ours holds, and the way in which it is tried."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                anywhere = re.search(rf"\b{name}\.(?:search|sub|split|find)", source)
                yield f"{found.name}.{name}", value, "search" if anywhere else "fullmatch"


def samples(parsed: Any) -> Iterator[str]:
    """Yield texts that parts of a parsed expression match: the pieces of a hostile text."""
    literal = ""
    for kind, value in parsed:
        if kind is kinds.LITERAL:
            literal += chr(value)
            continue
        if literal:
            yield literal
        literal = ""
        yield from _samples_of(kind, value)
    if literal:
        yield literal


def _samples_of(kind: Any, value: Any) -> Iterator[str]:
    if kind is kinds.IN:
        yield _one_of(value)
    elif kind in {kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT}:
        yield from samples(value[2])
    elif kind is kinds.SUBPATTERN:
        yield from samples(value[3])
        yield "".join(samples(value[3]))
    elif kind is kinds.BRANCH:
        for branch in value[1]:
            yield from samples(branch)
            yield "".join(samples(branch))
    elif kind in {kinds.ANY, kinds.NOT_LITERAL}:
        yield "a"


def _one_of(members: Any) -> str:
    """Return a character that a set matches, as good as its first member tells."""
    kind, value = members[0]
    classes = {kinds.CATEGORY_SPACE: " ", kinds.CATEGORY_DIGIT: "1"}
    if kind is kinds.LITERAL:
        return chr(value)
    if kind is kinds.NEGATE:
        return "-"
    return classes.get(value, "a") if kind is kinds.CATEGORY else "a"


def hostile(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str]]:
    """Yield the start of an expression, or nothing, and samples to repeat after it."""
    found = [sample for sample in samples(parser.parse(pattern.pattern, pattern.flags)) if sample]
    some = list(dict.fromkeys([*found, " ", "\n"]))[:_SAMPLES_MAX]
    begun = list(accumulate(found))[:_SAMPLES_MAX]
    for pump in dict.fromkeys([*some, *map("".join, permutations(some, 2)), *begun]):
        yield "", pump
        yield "".join(found), pump


def text_of(pattern: re.Pattern[Any], begin: str, pump: str, size: int) -> Any:
    text = f"{begin}{pump * -(-size // len(pump))}\x00"
    return text if isinstance(pattern.pattern, str) else text.encode()


def seems_slow(pattern: re.Pattern[Any], way: Way, begin: str, pump: str) -> bool:
    def match(size: int) -> None:
        getattr(pattern, way)(text_of(pattern, begin, pump, size))

    return not is_linear(match, SIZE)


def is_superlinear(
    pattern: re.Pattern[Any], way: Way, begin: str, pump: str, size: int = SIZE
) -> bool:
    """Return whether the steps grow faster than the text."""
    found = Backtracking(pattern, way)
    try:
        found.match(text_of(pattern, begin, pump, size), _STEPS_MAX)
        limit = _GROWTH_MAX * max(size, found.steps)
        found.match(text_of(pattern, begin, pump, FACTOR * size), limit)
    except TooManySteps:
        return True
    return False


@pytest.mark.parametrize("package", [proxy, supervisor], ids=["proxy", "supervisor"])
def test_no_expression_backtracks_in_superlinear_time(package: ModuleType) -> None:
    found = [*expressions(package)]
    assert found
    slow = [
        name
        for name, pattern, way in found
        if any(
            seems_slow(pattern, way, *text) and is_superlinear(pattern, way, *text)
            for text in hostile(pattern)
        )
    ]
    assert slow == []


@pytest.mark.parametrize(
    "expression", [r"\r\nname:[^\r\n]*\bmodel\b[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n", r"\s+$"]
)
def test_superlinear_backtracking_is_found(expression: str) -> None:
    pattern = re.compile(expression)
    assert any(is_superlinear(pattern, "search", *text, size=100) for text in hostile(pattern))


@pytest.mark.parametrize(
    ("expression", "way"),
    [
        (r"\s++$", "fullmatch"),
        (r"(?:a|b)*+c", "fullmatch"),
        (r"[a-z_]\w{0,20}(?=\(|$)", "search"),
    ],
)
def test_linear_backtracking_is_not_superlinear(expression: str, way: Way) -> None:
    pattern = re.compile(expression)
    assert not any(is_superlinear(pattern, way, *text, size=100) for text in hostile(pattern))


@pytest.mark.parametrize("package", [proxy, supervisor], ids=["proxy", "supervisor"])
def test_counted_matches_are_those_of_the_expression(package: ModuleType) -> None:
    for name, pattern, way in expressions(package):
        found = Backtracking(pattern, way)
        for begin in {begin for begin, _ in hostile(pattern)}:
            for pump in (" ", "a", begin or "a"):
                text = text_of(pattern, begin, pump, 1)
                for part in (text, text[:-1]):
                    is_match = getattr(pattern, way)(part) is not None
                    assert found.match(part, _STEPS_MAX) is is_match, (name, part)
