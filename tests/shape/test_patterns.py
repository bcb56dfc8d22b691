"""No expression backtracks for longer than its text is: a client may write the text."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, permutations
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest
from support.growth import is_linear

import proxy
import supervisor

SIZE = 1_000
_SAMPLES_MAX = 8


def expressions(package: ModuleType) -> Iterator[tuple[str, re.Pattern[Any], str]]:
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


def is_quick(pattern: re.Pattern[Any], way: str) -> bool:
    """Return whether the time for every hostile text grows with its length."""

    def match(begin: str, pump: str, size: int) -> None:
        text: Any = f"{begin}{pump * (size // len(pump))}\x00"
        getattr(pattern, way)(text if isinstance(pattern.pattern, str) else text.encode())

    return all(is_linear(partial(match, *text), SIZE) for text in hostile(pattern))


@pytest.mark.parametrize("package", [proxy, supervisor], ids=["proxy", "supervisor"])
def test_no_expression_backtracks_in_superlinear_time(package: ModuleType) -> None:
    found = {name: is_quick(pattern, way) for name, pattern, way in expressions(package)}
    assert found
    assert [name for name, quick in found.items() if not quick] == []


@pytest.mark.parametrize(
    "expression", [r"\r\nname:[^\r\n]*\bmodel\b[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n", r"\s+$"]
)
def test_superlinear_backtracking_is_found(expression: str) -> None:
    assert not is_quick(re.compile(expression), "search")
