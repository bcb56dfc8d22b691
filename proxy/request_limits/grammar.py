"""Limits of grammars (GBNF) and regular expressions, measured in one pass over the text.

Counts what an engine recurses over or multiplies: parentheses, alternatives, and consecutive
optional parts.

Source: grammars/README.md of llama.cpp; ECMAScript's regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from proxy.request_limits.grammar_stacks import count_stacks
from proxy.request_limits.limits import RequestLimits

# Quantifiers are possessive, so nothing backtracks and time is linear in the text.
_GRAMMAR: Final = re.compile(
    r'"(?:[^"\\]++|\\.)*+"?|\[(?:[^\]\\]++|\\.)*+\]?|#[^\n]*+|::=|[()|?*{]', re.DOTALL
)
_PATTERN: Final = re.compile(r"\\.|\[(?:[^\]\\]++|\\.)*+\]?|\(\?|[()|?*{]", re.DOTALL)


@dataclass(slots=True)
class _Shape:
    """Counts so far; `optionals` is the longest run of optional or repeated parts."""

    depth: int = 0
    rules: int = 0
    alternatives: int = 0
    optionals: int = 0


def check_grammar(limits: RequestLimits, member: str, text: str) -> None:
    limits.enforce(member, "characters", len(text), "grammar_bytes")
    _check_shape(limits, member, _GRAMMAR, text)
    limits.enforce(member, "parse stacks", count_stacks(text), "grammar_stacks")


class Patterns:
    """All regular expressions of one request, which share the limit of their length."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._chars = 0

    def count(self, member: str, text: str) -> None:
        """Count a text from which an engine makes an expression."""
        self._chars += len(text)
        unit = "characters of regular expressions"
        self._limits.enforce(member, unit, self._chars, "pattern_bytes")

    def check(self, member: str, text: str) -> None:
        """Count an expression and check its shape."""
        self.count(member, text)
        _check_shape(self._limits, member, _PATTERN, text)


def _check_shape(limits: RequestLimits, member: str, tokens: re.Pattern[str], text: str) -> None:
    for shape in _shapes(tokens, text):  # stops at the first excess
        limits.enforce(member, "levels of parentheses", shape.depth, "grammar_depth")
        limits.enforce(member, "rules", shape.rules, "grammar_rules")
        limits.enforce(member, "alternatives", shape.alternatives, "grammar_alternatives")
        unit = "consecutive optional parts"
        limits.enforce(member, unit, shape.optionals, "grammar_optionals")


def _shapes(tokens: re.Pattern[str], text: str) -> Iterator[_Shape]:
    """Yield the counts after each token; always the same object."""
    shape, open_counts, count = _Shape(), list[int](), 0
    for found in tokens.finditer(text):
        match found[0]:
            case "(" | "(?":
                open_counts.append(count)
                count = 0
                shape.depth = max(shape.depth, len(open_counts))
            case ")":
                count = open_counts.pop() if open_counts else 0
            case "|":
                shape.alternatives, count = shape.alternatives + 1, 0
            case "::=":
                shape.rules, count = shape.rules + 1, 0
            case "?" | "*" | "{":
                count += 1
                shape.optionals = max(shape.optionals, count)
            case _:  # a literal, a character class, a comment
                continue
        yield shape
