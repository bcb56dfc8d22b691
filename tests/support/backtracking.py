"""Counts the steps in which a regular expression backtracks, as Python's engine would.

A count is the same on each machine and under any load, so growth that it shows is that of the
expression. The nodes are those of `re`, which itself tells whether a character or a place matches.

Source: Python, Lib/re/_parser.py and Modules/_sre/sre_lib.h.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final, Literal

Way = Literal["search", "fullmatch"]

# Returns whether the rest of the expression matches from a place on.
_Then = Callable[[int], bool]
_CHARACTERS: Final = frozenset({kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN})
_REPEATS: Final = frozenset({kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT})
_FRAMES_MAX: Final = 50_000


class TooManySteps(Exception):
    """The limit of steps was reached."""


class Backtracking:
    """One expression; `steps` are those of its latest match."""

    def __init__(self, pattern: re.Pattern[Any], way: Way) -> None:
        self._parsed = parser.parse(pattern.pattern, pattern.flags)
        self._is_text = isinstance(pattern.pattern, str)
        self._flags = pattern.flags
        self._way = way
        self._text: Any = ""
        self._limit = self.steps = 0
        self._groups: dict[int, tuple[int, int]] = {}
        self._matches = self._sequence(self._parsed, self._is_end)

    def match(self, text: Any, limit: int) -> bool:
        """Return whether a text matches; raises TooManySteps."""
        self._text, self._limit, self.steps = text, limit, 0
        self._groups.clear()
        with _many_frames():
            places = range(len(text) + 1) if self._way == "search" else (0,)
            return any(map(self._matches, places))

    def _is_end(self, at: int) -> bool:
        return self._way == "search" or at == len(self._text)

    def _step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self._limit:
            raise TooManySteps

    def _sequence(self, nodes: Any, then: _Then) -> _Then:
        literal = ""
        for kind, value in reversed(nodes):
            if kind is kinds.LITERAL and not self._flags & re.IGNORECASE:
                literal = chr(value) + literal
                continue
            then = self._node(kind, value, self._literal(literal, then))
            literal = ""
        return self._literal(literal, then)

    def _literal(self, literal: str, then: _Then) -> _Then:
        if not literal:
            return then
        wanted = literal if self._is_text else literal.encode("latin-1")

        def match(at: int) -> bool:
            self._step()
            return self._text.startswith(wanted, at) and then(at + len(wanted))

        return match

    def _node(self, kind: Any, value: Any, then: _Then) -> _Then:
        steps_of = {
            **dict.fromkeys(_CHARACTERS, self._character),
            **dict.fromkeys(_REPEATS, self._repeat),
            **dict.fromkeys((kinds.ASSERT, kinds.ASSERT_NOT), self._look),
            kinds.SUBPATTERN: self._group,
            kinds.BRANCH: self._branch,
            kinds.ATOMIC_GROUP: self._atomic,
            kinds.GROUPREF: self._reference,
            kinds.AT: self._place,
        }
        assert kind in steps_of, f"steps of {kind} are not known"
        return steps_of[kind](kind, value, then)

    def _is_matched_by_re(self, kind: Any, value: Any) -> re.Pattern[Any]:
        single = parser.SubPattern(self._parsed.state, [(kind, value)])
        found: re.Pattern[Any] = compiler.compile(single, self._flags)
        return found

    def _character(self, kind: Any, value: Any, then: _Then) -> _Then:
        return self._repeat_character(kind, value, (1, 1, kinds.POSSESSIVE_REPEAT), then)

    def _repeat_character(
        self, kind: Any, value: Any, times: tuple[int, int, Any], then: _Then
    ) -> _Then:
        matches, known = self._is_matched_by_re(kind, value).match, dict[Any, bool]()
        least, most, repeat = times

        def match(at: int) -> bool:
            text = self._text
            stop, end = min(len(text), at + int(most)), at
            while end < stop:
                character = text[end : end + 1]
                if character not in known:
                    known[character] = matches(character) is not None
                if not known[character]:
                    break
                end += 1
            self._step(1 + end - at)
            ends = range(at + least, end + 1)
            if repeat is kinds.POSSESSIVE_REPEAT:
                ends = ends[-1:]
            return _first_of((then,), ends if repeat is kinds.MIN_REPEAT else reversed(ends))

        return match

    def _repeat(self, kind: Any, value: Any, then: _Then) -> _Then:
        least, most, body = value
        if len(body) == 1 and body[0][0] in _CHARACTERS:
            return self._repeat_character(body[0][0], body[0][1], (least, most, kind), then)
        if kind is kinds.POSSESSIVE_REPEAT:
            return self._atomic(kind, [(kinds.MAX_REPEAT, value)], then)
        return self._repeat_group(body, (least, most, kind), then)

    def _repeat_group(self, body: Any, times: tuple[int, int, Any], then: _Then) -> _Then:
        least, most, kind = times
        begun: list[tuple[int, int]] = []  # the number and the start of each open repetition

        def enter(at: int, number: int) -> bool:
            self._step()
            if kind is kinds.MIN_REPEAT and number >= least and then(at):
                return True
            if number < most:
                begun.append((number, at))
                if once(at):
                    return True
                begun.pop()
            return kind is kinds.MAX_REPEAT and number >= least and then(at)

        def after(at: int) -> bool:
            number, start = begun.pop()
            is_empty = at == start and number >= least
            found = not is_empty and enter(at, number + 1)
            begun.append((number, start))
            return found

        once = self._sequence(body, after)

        def match(at: int) -> bool:
            return enter(at, 0)

        return match

    def _group(self, _: Any, value: Any, then: _Then) -> _Then:
        number, _, _, body = value
        if number is None:
            return self._sequence(body, then)
        starts: list[int] = []

        def end(at: int) -> bool:
            before, start = self._groups.get(number), starts.pop()
            self._groups[number] = start, at
            found = then(at)
            starts.append(start)
            if not found and before:
                self._groups[number] = before
            elif not found:
                del self._groups[number]
            return found

        inside = self._sequence(body, end)

        def match(at: int) -> bool:
            starts.append(at)
            found = inside(at)
            starts.pop()
            return found

        return match

    def _branch(self, _: Any, value: Any, then: _Then) -> _Then:
        branches = [self._sequence(nodes, then) for nodes in value[1]]

        def match(at: int) -> bool:
            self._step()
            return _first_of(branches, (at,))

        return match

    def _atomic(self, _: Any, body: Any, then: _Then) -> _Then:
        ends: list[int] = []

        def end(at: int) -> bool:
            ends.append(at)
            return True

        inside = self._sequence(body, end)

        def match(at: int) -> bool:
            self._step()
            return inside(at) and then(ends.pop())

        return match

    def _look(self, kind: Any, value: Any, then: _Then) -> _Then:
        direction, body = value
        inside = self._sequence(body, lambda _: True)
        width = body.getwidth()[0] if direction < 0 else 0

        def match(at: int) -> bool:
            self._step()
            is_found = at >= width and inside(at - width)
            return is_found == (kind is kinds.ASSERT) and then(at)

        return match

    def _reference(self, _: Any, number: int, then: _Then) -> _Then:
        def match(at: int) -> bool:
            start, end = self._groups.get(number, (0, -1))
            known = self._text[start : max(start, end)]
            self._step(1 + len(known))
            is_same = end >= 0 and self._text[at : at + len(known)] == known
            return is_same and then(at + len(known))

        return match

    def _place(self, kind: Any, value: Any, then: _Then) -> _Then:
        matches = self._is_matched_by_re(kind, value).match

        def match(at: int) -> bool:
            self._step()
            return matches(self._text, at) is not None and then(at)

        return match


def _first_of(ways: Iterable[_Then], places: Iterable[int]) -> bool:
    """Return whether one of these matches; `any` would take C stack for each nested call."""
    for at in places:
        for then in ways:
            if then(at):
                return True
    return False


@contextmanager
def _many_frames() -> Iterator[None]:
    """Each repetition of a group takes some frames."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(_FRAMES_MAX)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
