"""Where the values of a JSON text with comments stand in it. Pure.

Comments (`//`, `/* */`) and a comma behind the last member pass, as Zed and opencode read them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

_WHITE: Final = re.compile(r"\s*")
# How comments begin and end.
_COMMENTS: Final = (("//", "\n"), ("/*", "*/"))
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_DEPTH_MAX: Final = 100


@dataclass(slots=True)
class Node:
    """A value from `start` to `end`; `members` are those of an object, else None."""

    start: int
    end: int
    value: Any
    members: list[Member] | None = None


@dataclass(slots=True)
class Member:
    """A member of an object; `start` is that of its name."""

    start: int
    name: str
    node: Node = field(default_factory=lambda: Node(0, 0, None))

    @property
    def end(self) -> int:
        return self.node.end


def parse(text: str) -> Node:
    """Return the whole text's value; raises ValueError."""
    reader = _Reader(text)
    node = reader.value(0)
    if reader.at_blank_end() != len(text):
        raise reader.error("something follows the value")
    return node


def blank_end(text: str, at: int) -> int:
    """Return where white space and comments end."""
    while True:
        white = _WHITE.match(text, at)
        at = white.end() if white else at
        ends = [end for begin, end in _COMMENTS if text.startswith(begin, at)]
        if not ends:
            return at
        found = text.find(ends[0], at + 2)
        at = len(text) if found < 0 else found + len(ends[0])


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def at_blank_end(self) -> int:
        self._at = blank_end(self._text, self._at)
        return self._at

    def error(self, what: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self._at) + 1}: {what}")

    def value(self, depth: int) -> Node:
        start = self.at_blank_end()
        if depth > _DEPTH_MAX:
            raise self.error("too many levels")
        match self._text[start : start + 1]:
            case "{":
                return self._object(start, depth)
            case "[":
                return self._list(start, depth)
            case '"':
                text = self._string()
                return Node(start, self._at, text)
        if not (found := _SCALAR.match(self._text, start)):
            raise self.error("a value is missing")
        self._at = found.end()
        return Node(start, self._at, json.loads(found[0]))

    def _string(self) -> str:
        if not (found := _STRING.match(self._text, self._at)):
            raise self.error("a string is missing")
        self._at = found.end()
        value: str = json.loads(found[0])
        return value

    def _object(self, start: int, depth: int) -> Node:
        members: list[Member] = []
        self._at += 1
        while not self._ends("}"):
            member = Member(self.at_blank_end(), self._string())
            self._expect(":")
            member.node = self.value(depth + 1)
            members.append(member)
            self._comma("}")
        value = {member.name: member.node.value for member in members}
        return Node(start, self._at, value, members)

    def _list(self, start: int, depth: int) -> Node:
        values = []
        self._at += 1
        while not self._ends("]"):
            values.append(self.value(depth + 1).value)
            self._comma("]")
        return Node(start, self._at, values)

    def _ends(self, mark: str) -> bool:
        if not self._text.startswith(mark, self.at_blank_end()):
            return False
        self._at += 1
        return True

    def _comma(self, end: str) -> None:
        if not self._text.startswith(end, self.at_blank_end()):
            self._expect(",")

    def _expect(self, mark: str) -> None:
        if not self._text.startswith(mark, self.at_blank_end()):
            raise self.error(f"{mark} is missing")
        self._at += 1
