"""JSON, with comments or without; all but the value in question stays as it is. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from supervisor.connect.formats.json_nodes import Member, Node, blank_end, parse
from supervisor.connect.place import ABSENT, Place, nested

_EMPTY: Final = "{\n}\n"
_INDENT: Final = re.compile(r'^([ \t]+)"', re.MULTILINE)
_SPACES: Final = "  "


def read(text: str, place: Place) -> Any:
    found, rest = _deepest(_parsed(text), place)
    return ABSENT if rest else found.value


def put(text: str, place: Place, value: Any) -> str:
    """Set a value; raises ValueError where the way to it leads through no object."""
    text = text if text.strip() else _EMPTY
    node, rest = _deepest(parse(text), place)
    if not rest:
        return text[: node.start] + _written(text, node.start, value) + text[node.end :]
    if node.members is None:
        raise ValueError(f"{rest[0]} stands in no object")
    return _added(text, node, str(rest[0]), nested(rest[1:], value))


def drop(text: str, place: Place) -> str:
    parent, _ = _deepest(parse(text), place[:-1])
    members = parent.members or []
    at = next(number for number, one in enumerate(members) if one.name == place[-1])
    start, end = _span(text, parent, members, at)
    return text[:start] + text[end:]


def _parsed(text: str) -> Node:
    return parse(text if text.strip() else _EMPTY)


def _deepest(node: Node, place: Place) -> tuple[Node, Place]:
    """Return the last value on the way to a place, and the rest of the way."""
    for number, step in enumerate(place):
        found = [one for one in node.members or () if one.name == step]
        if not found:
            return node, place[number:]
        node = found[-1].node
    return node, ()


def _added(text: str, node: Node, name: str, value: Any) -> str:
    """Return the text with one more member at the end of an object."""
    members = node.members or []
    start = members[-1].end if members else node.start + 1
    indent = _line_indent(text, members[0].start if members else node.start)
    if not members:
        indent += _unit(text)
    member = f"{json.dumps(name)}: {_dumped(text, indent, value)}"
    is_inline = members and "\n" not in text[node.start : node.end]
    before = ", " if is_inline else f"{',' if members else ''}\n{indent}"
    after = text[start:]
    if not members and "\n" not in text[node.start : node.end]:
        after = f"\n{_line_indent(text, node.start)}{after.lstrip(' ')}"
    return text[:start] + before + member + after


def _span(text: str, parent: Node, members: list[Member], at: int) -> tuple[int, int]:
    """Return what to cut to remove a member: its comma too, and no comment."""
    start, end = members[at].start, members[at].end
    if at + 1 < len(members):
        comma = blank_end(text, end)
        rest = text[comma + 1 : members[at + 1].start]
        is_bare = not text[end:comma].strip() and not rest.strip()
        return start, members[at + 1].start if is_bare else comma + 1
    if at and text[members[at - 1].end : start].strip() == ",":
        return members[at - 1].end, end
    if not at and not text[parent.start + 1 : start].strip():
        return parent.start + 1, end
    return start, end


def _written(text: str, at: int, value: Any) -> str:
    return _dumped(text, _line_indent(text, at), value)


def _dumped(text: str, indent: str, value: Any) -> str:
    dumped = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    return dumped.replace("\n", f"\n{indent}")


def _line_indent(text: str, at: int) -> str:
    """Return the white space that the line of a position begins with."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _unit(text: str) -> str:
    found = _INDENT.search(text)
    return found[1] if found else _SPACES
