"""In how many ways an engine must read a grammar at once. Pure; time grows with its size.

Before each token an engine follows every way from where it stands to the next character, one after
the other: rules that hold one another twice (`a ::= b b`, `b ::= c c` …, with an empty last one, or
`a ::= b | b`) have 2^n. Here the ways of each rule are counted once, from those of its parts.

Source: llama_grammar_advance_stack in src/llama-grammar.cpp of llama.cpp, build 10434;
grammars/README.md for the notation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

WAYS_MAX: Final = 2**31 - 1
# Rounds in which rules that hold one another come to rest; those that do not are left-recursive.
_ROUNDS_MAX: Final = 6
_REPEATS_MAX: Final = 32
# Parentheses inside one another beyond which nothing is counted: there are too many ways.
_LEVELS_MAX: Final = 200
_TOKEN: Final = re.compile(
    r"""
      (?P<head>[\w-]++)\s*+::=
    | (?P<name>[\w-]++)
    | (?P<end>"(?:[^"\\]++|\\.)*+"? | \[(?:[^\]\\]++|\\.)*+\]? | \.)
    | \#[^\n]*+
    | (?P<mark>[()|?*+]) | \{(?P<least>\d{0,9}),?(?P<most>\d{0,9})\}
    """,
    re.VERBOSE | re.DOTALL,
)

# Ways to a next character, and ways to the part's end without one.
_Ways = tuple[int, int]
_END: Final[_Ways] = (1, 0)


@dataclass(slots=True)
class Part:
    """A character, a rule by its name, or alternatives in parentheses; repeated or not.

    Attributes:
        name: Of a rule; empty for a character.
        choices: The alternatives in parentheses.
        least: How often it stands there at least.
        most: How often at most, cut at 32.
    """

    name: str | int = ""
    choices: list[list[Part]] = field(default_factory=list)
    least: int = 1
    most: int = 1


Rules = dict[str | int, list[list[Part]]]


# A rule that begins with itself: its ways never settle.
_ENDLESS: Final[Rules] = {"root": [[Part("root")], [Part()]]}


def count_ways(grammar: str) -> int:
    """Return the most ways that are followed at once in a grammar, at most `WAYS_MAX`."""
    return settled(_parsed(grammar))


def settled(rules: Rules) -> int:
    """Return the most ways that are followed at once, from the alternatives of each rule."""
    ways: dict[str | int, _Ways] = dict.fromkeys(rules, (0, 0))
    for _ in range(_ROUNDS_MAX):
        before, most = dict(ways), 0
        for name in _order(rules):
            ways[name], here = _of_choices(rules[name], ways)
            most = max(most, here)
        if most >= WAYS_MAX or ways == before:
            return most
    return WAYS_MAX


def _parsed(grammar: str) -> Rules:
    """Return the alternatives of each rule; what is no grammar is for the engine to refuse."""
    rules: Rules = {}
    levels: list[list[list[Part]]] = [[[]]]
    for found in _TOKEN.finditer(grammar):
        if name := found["head"]:
            rules[name] = [[]]  # the last of a name counts
            levels = [rules[name]]
        elif len(levels) > _LEVELS_MAX:
            return _ENDLESS
        else:
            _take(levels, found)
    return rules


def _take(levels: list[list[list[Part]]], found: re.Match[str]) -> None:
    """Add what one token says to the alternatives that are open."""
    choices = levels[-1]
    match found["mark"] or "":
        case "(":
            choices[-1].append(Part(choices=[[]]))
            levels.append(choices[-1][-1].choices)
        case ")":
            del levels[max(1, len(levels) - 1) :]
        case "|":
            choices.append([])
        case _ if found["end"] or found["name"]:
            if found["end"] != '""':
                choices[-1].append(Part(found["name"] or ""))
        case _ if choices[-1]:
            _repeat(choices[-1][-1], found)


def _repeat(part: Part, found: re.Match[str]) -> None:
    if mark := found["mark"]:
        part.least, part.most = {"?": (0, 1), "*": (0, _REPEATS_MAX)}.get(mark, (1, _REPEATS_MAX))
    elif found["least"] is not None:
        part.least = int(found["least"] or 0)
        open_end = _REPEATS_MAX if "," in found[0] else part.least
        part.most = min(int(found["most"] or open_end), _REPEATS_MAX)


def _order(rules: Rules) -> list[str | int]:
    """Return the rules, each behind those that it holds where that can be."""
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
            todo += [(one, False) for one in _names(rules[name]) if one in rules]
    return list(order)


def _names(choices: list[list[Part]]) -> Iterator[str | int]:
    for part in (part for sequence in choices for part in sequence):
        if part.choices:
            yield from _names(part.choices)
        elif part.name:
            yield part.name


def _of_choices(choices: list[list[Part]], ways: Mapping[str | int, _Ways]) -> tuple[_Ways, int]:
    """Return the ways of alternatives, and the most from any place inside them."""
    first, empty, most = 0, 0, 0
    for sequence in choices:
        ahead, through = 0, 1
        for part in reversed(sequence):
            (own, none), inner = _of_part(part, ways)
            ahead, through = min(own + none * ahead, WAYS_MAX), min(none * through, WAYS_MAX)
            most = max(most, inner, ahead)
        first, empty = min(first + ahead, WAYS_MAX), min(empty + through, WAYS_MAX)
    return (first, empty), max(most, first)


def _of_part(part: Part, ways: Mapping[str | int, _Ways]) -> tuple[_Ways, int]:
    if part.choices:
        (first, empty), most = _of_choices(part.choices, ways)
    else:
        (first, empty), most = ways.get(part.name, _END), 0
    if part.least == part.most == 1:
        return (first, empty), most
    if part.most == 0:
        return (0, 1), most
    through = 1
    if empty:
        for _ in range(part.most):
            first, through = min(first * 2, WAYS_MAX), min(through * (empty + 1), WAYS_MAX)
    return (first, through if part.least == 0 or empty else 0), max(most, first)
