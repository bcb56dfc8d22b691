"""No expression backtracks for longer than its text is: a client may write the text."""

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Iterator
from itertools import accumulate, permutations
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest

import proxy
import supervisor

SIZE = 25_000
# A quadratic expression takes half a second for a text of that size, a linear one 1 ms.
LIMIT_S = 0.1
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
    """Yield texts that parts of a parsed expression match: what a hostile text is made of."""
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


def hostile(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yield texts of one sample, or two, again and again, behind what an expression begins with."""
    found = [sample for sample in samples(parser.parse(pattern.pattern, pattern.flags)) if sample]
    some = list(dict.fromkeys([*found, " ", "\n"]))[:_SAMPLES_MAX]
    begun = list(accumulate(found))[:_SAMPLES_MAX]
    for pump in dict.fromkeys([*some, *map("".join, permutations(some, 2)), *begun]):
        many = pump * (SIZE // len(pump))
        yield f"{many}\x00"
        yield f"{''.join(found)}{many}\x00"


def slowest_s(pattern: re.Pattern[Any], way: str) -> float:
    """Return the processor time that the worst text takes, or the first that takes too long."""
    slowest = 0.0
    for text in hostile(pattern):
        tried: Any = text if isinstance(pattern.pattern, str) else text.encode()
        began_s = time.thread_time()
        getattr(pattern, way)(tried)
        slowest = max(slowest, time.thread_time() - began_s)
        if slowest > LIMIT_S:
            break
    return slowest


@pytest.mark.parametrize("package", [proxy, supervisor], ids=["proxy", "supervisor"])
def test_no_expression_backtracks_in_superlinear_time(package: ModuleType) -> None:
    took_s = {name: slowest_s(pattern, way) for name, pattern, way in expressions(package)}
    assert took_s
    assert {name: s for name, s in took_s.items() if s > LIMIT_S} == {}


@pytest.mark.parametrize(
    "expression", [r"\r\nname:[^\r\n]*\bmodel\b[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n", r"\s+$"]
)
def test_superlinear_backtracking_is_found(expression: str) -> None:
    assert slowest_s(re.compile(expression), "search") > LIMIT_S
