"""Limits of grammars (GBNF) and regular expressions. Time is linear in their size.

One pass counts everything that an engine recurses over or multiplies: parentheses, alternatives,
and consecutive optional parts.

Before each token an engine expands every stack to the next character, one after the other. Rules
that reference one another twice (`a ::= b b`, `b ::= c c` …, with an empty last one, or `a ::= b |
b`) have 2^n stacks. `count_stacks` computes the expansions of each rule once, from those of its
parts.

Source: grammars/README.md of llama.cpp for the notation; llama_grammar_advance_stack in
src/llama-grammar.cpp, build 10434; ECMAScript's regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.settings import RequestLimits

STACKS_MAX: Final = 2**31 - 1
# Mutually recursive rules settle within this many rounds, or are left-recursive.
_ROUNDS_MAX: Final = 6
_REPEATS_MAX: Final = 32
# Deeper parentheses are not parsed but count as too many stacks.
_LEVELS_MAX: Final = 200
_TOKEN: Final = re.compile(
    r"""
      (?P<head>[\w-]++)\s*+::=
    | (?P<name>[\w-]++)
    | (?P<end>"(?:[^"\\]++|\\.)*+"? | \[(?:[^\]\\]++|\\.)*+\]? | \.)
    | \#[^\n]*+
    | (?P<operator>[()|?*+]) | \{(?P<least>\d{0,9}),?(?P<most>\d{0,9})\}
    """,
    re.VERBOSE | re.DOTALL,
)

# Expansions of a part to a next character, and to its end without one.
_Expansions = tuple[int, int]
_CHARACTER: Final[_Expansions] = (1, 0)


@dataclass(slots=True)
class Part:
    """A character (no name), a reference to a rule, or alternatives in parentheses; repeated."""

    name: str | int = ""
    alternatives: list[list[Part]] = field(default_factory=list)
    least: int = 1
    most: int = 1


Rules = dict[str | int, list[list[Part]]]

_LEFT_RECURSIVE: Final[Rules] = {"root": [[Part("root")], [Part()]]}


def count_stacks(grammar: str) -> int:
    """Return the most parse stacks at once, at most `STACKS_MAX`."""
    return most_stacks(_parse_grammar(grammar))


def most_stacks(rules: Rules) -> int:
    """Return the most parse stacks at once, from the alternatives of each rule."""
    known: dict[str | int, _Expansions] = dict.fromkeys(rules, (0, 0))
    order = _dependencies_first(rules)
    for _ in range(_ROUNDS_MAX):
        before, most = dict(known), 0
        for name in order:
            known[name], here = _expand_alternatives(rules[name], known)
            most = max(most, here)
        if most >= STACKS_MAX or known == before:
            return most
    return STACKS_MAX


def _parse_grammar(grammar: str) -> Rules:
    """Return the alternatives of each rule; the engine rejects invalid grammars."""
    rules: Rules = {}
    levels: list[list[list[Part]]] = [[[]]]
    for found in _TOKEN.finditer(grammar):
        if name := found["head"]:
            rules[name] = [[]]  # the last definition counts
            levels = [rules[name]]
        elif len(levels) > _LEVELS_MAX:
            return _LEFT_RECURSIVE
        else:
            _add(levels, found)
    return rules


def _add(levels: list[list[list[Part]]], found: re.Match[str]) -> None:
    alternatives = levels[-1]
    match found["operator"] or "":
        case "(":
            alternatives[-1].append(Part(alternatives=[[]]))
            levels.append(alternatives[-1][-1].alternatives)
        case ")":
            del levels[max(1, len(levels) - 1) :]
        case "|":
            alternatives.append([])
        case _ if found["end"] or found["name"]:
            if found["end"] != '""':
                alternatives[-1].append(Part(found["name"] or ""))
        case _ if alternatives[-1]:
            _repeat(alternatives[-1][-1], found)


def _repeat(part: Part, found: re.Match[str]) -> None:
    if operator := found["operator"]:
        part.least, part.most = {"?": (0, 1), "*": (0, _REPEATS_MAX)}.get(
            operator, (1, _REPEATS_MAX)
        )
    elif found["least"] is not None:
        part.least = int(found["least"] or 0)
        open_end = _REPEATS_MAX if "," in found[0] else part.least
        part.most = min(int(found["most"] or open_end), _REPEATS_MAX)


def _dependencies_first(rules: Rules) -> list[str | int]:
    """Return the rules, each after the rules that it references if possible."""
    order: dict[str | int, None] = {}
    begun: set[str | int] = set()
    todo = [(name, False) for name in rules]
    while todo:
        name, is_done = todo.pop()
        if is_done:
            order[name] = None
        elif name not in begun:
            begun.add(name)
            todo.append((name, True))
            todo += [
                (reference, False) for reference in _references(rules[name]) if reference in rules
            ]
    return list(order)


def _references(alternatives: list[list[Part]]) -> Iterator[str | int]:
    for part in (part for sequence in alternatives for part in sequence):
        if part.alternatives:
            yield from _references(part.alternatives)
        elif part.name:
            yield part.name


def _expand_alternatives(
    alternatives: list[list[Part]], known: Mapping[str | int, _Expansions]
) -> tuple[_Expansions, int]:
    """Return the expansions of alternatives, and the most from any position inside them."""
    first, empty, most = 0, 0, 0
    for sequence in alternatives:
        ahead, through = 0, 1
        for part in reversed(sequence):
            (own, none), inner = _expand_part(part, known)
            ahead, through = min(own + none * ahead, STACKS_MAX), min(none * through, STACKS_MAX)
            most = max(most, inner, ahead)
        first, empty = min(first + ahead, STACKS_MAX), min(empty + through, STACKS_MAX)
    return (first, empty), max(most, first)


def _expand_part(part: Part, known: Mapping[str | int, _Expansions]) -> tuple[_Expansions, int]:
    if part.alternatives:
        (first, empty), most = _expand_alternatives(part.alternatives, known)
    else:
        (first, empty), most = known.get(part.name, _CHARACTER), 0
    if part.least == part.most == 1:
        return (first, empty), most
    if part.most == 0:
        return (0, 1), most
    through = 1
    if empty:
        for _ in range(part.most):
            first, through = min(first * 2, STACKS_MAX), min(through * (empty + 1), STACKS_MAX)
    return (first, through if part.least == 0 or empty else 0), max(most, first)


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
    """The regular expressions of one request, which share the limit on length."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._chars = 0

    def count(self, member: str, text: str) -> None:
        """Count a text that an engine turns into an expression."""
        self._chars += len(text)
        unit = "characters of regular expressions"
        self._limits.enforce(member, unit, self._chars, "pattern_bytes")

    def check(self, member: str, text: str) -> None:
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
