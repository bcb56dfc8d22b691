"""The shape of a grammar or a regular expression, measured in one pass. Pure.

What it measures is what an engine recurses over or multiplies: parentheses, alternatives, and parts
in a row of which each may be left out.

Source: GBNF, grammars/README.md of llama.cpp; ECMAScript's regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Quantifiers are possessive: no part is ever tried in another way, so time grows with the text.
_GRAMMAR: Final = re.compile(
    r'"(?:[^"\\]++|\\.)*+"?|\[(?:[^\]\\]++|\\.)*+\]?|#[^\n]*+|::=|[()|?*{]', re.DOTALL
)
_PATTERN: Final = re.compile(r"\\.|\[(?:[^\]\\]++|\\.)*+\]?|\(\?|[()|?*{]", re.DOTALL)


@dataclass(slots=True)
class Shape:
    """What was counted so far; at the end, of the whole text.

    Attributes:
        depth: Most parentheses inside one another.
        rules: Rules.
        alternatives: Bars between alternatives.
        optionals: Most optional or repeated parts in one sequence.
    """

    depth: int = 0
    rules: int = 0
    alternatives: int = 0
    optionals: int = 0


def measure(text: str, check: Callable[[Shape], None], *, is_grammar: bool) -> Shape:
    """Return the shape of a text.

    Args:
        text: A grammar, or a regular expression.
        check: Called after each step; what it raises ends the count.
        is_grammar: Whether it is a grammar.
    """
    shape, open_counts, count = Shape(), list[int](), 0
    for found in (_GRAMMAR if is_grammar else _PATTERN).finditer(text):
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
            case _:  # a literal, a class of characters, a comment
                continue
        check(shape)
    return shape
