"""Formats of settings files (JSON, TOML, YAML, NAME=VALUE): values change, the rest stays. Pure.

JSON may have comments (`//`, `/* */`) and a comma after the last member, as Zed and opencode allow.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import MutableMapping, MutableSequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent
from tomlkit.exceptions import TOMLKitError

from supervisor.clients.client import ABSENT, Place, Step, nest_value


def get_from_tree(tree: Any, place: Place) -> Any:
    """Return the value at a place, or ABSENT."""
    for step in place:
        if (key := _key(tree, step)) is ABSENT:
            return ABSENT
        tree = tree[key]
    return tree


def put_in_tree(tree: Any, place: Place, value: Any) -> None:
    """Set a value; make the tables and lists that lead to it."""
    for number, step in enumerate(place):
        key, rest = _key(tree, step), place[number + 1 :]
        if key is ABSENT:
            _add(tree, step, nest_value(rest, value))
            return
        if not rest:
            tree[key] = value
            return
        tree = tree[key]


def drop_from_tree(tree: Any, place: Place) -> None:
    """Remove a value that is there."""
    *way, last = place
    parent = get_from_tree(tree, tuple(way))
    del parent[_key(parent, last)]


def _key(tree: Any, step: Step) -> Any:
    """Return the key or index of a step, or ABSENT; raises TypeError for another kind of value."""
    if isinstance(step, str):
        if not isinstance(tree, MutableMapping):
            raise TypeError(f"{step} stands in no table")
        return step if step in tree else ABSENT
    if not isinstance(tree, MutableSequence):
        raise TypeError(f"{step[1]} stands in no list")
    name, value = step
    items = (at for at, item in enumerate(tree) if isinstance(item, MutableMapping))
    return next((at for at in items if tree[at].get(name) == value), ABSENT)


def _add(tree: Any, step: Step, value: Any) -> None:
    if isinstance(step, str):
        tree[step] = value
    else:
        tree.append(value)


_LINE: Final = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read_env(text: str, place: Place) -> Any:
    """Return the last value of a name, as a shell would."""
    found = [match[2] for line in text.splitlines() if (match := _match_name(line, place))]
    return "".join(shlex.split(found[-1])) if found else ABSENT


def put_env(text: str, place: Place, value: Any) -> str:
    line = f"{place[0]}={shlex.quote(str(value))}"
    if read_env(text, place) is ABSENT:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{line}\n"
    return _join_lines(
        [line if _match_name(old_line, place) else old_line for old_line in text.splitlines()]
    )


def drop_env(text: str, place: Place) -> str:
    return _join_lines([line for line in text.splitlines() if not _match_name(line, place)])


def _match_name(line: str, place: Place) -> re.Match[str] | None:
    found = _LINE.fullmatch(line)
    return found if found and found[1] == place[0] else None


def _join_lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


_WHITE: Final = re.compile(r"\s*")
# Begin and end of comments.
_COMMENTS: Final = (("//", "\n"), ("/*", "*/"))
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_DEPTH_MAX: Final = 100


@dataclass(slots=True)
class Node:
    """A value from `start` to `end`.

    `members` has the start, name and value of each member; it is None unless this is an object.
    """

    start: int
    end: int
    value: Any
    members: list[tuple[int, str, Node]] | None = None


def parse(text: str) -> Node:
    """Return the whole text's value; raises ValueError."""
    reader = _Reader(text)
    node = reader.value(0)
    if reader.at_blank_end() != len(text):
        raise reader.error("something follows the value")
    return node


def blank_end(text: str, at: int) -> int:
    """Return the position after white space and comments."""
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
        members: list[tuple[int, str, Node]] = []
        self._at += 1
        while not self._ends("}"):
            name_start, name = self.at_blank_end(), self._string()
            self._expect(":")
            members.append((name_start, name, self.value(depth + 1)))
            self._comma("}")
        value = {name: node.value for _, name, node in members}
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


_EMPTY: Final = "{\n}\n"
_JSON_INDENT: Final = re.compile(r'^([ \t]+)"', re.MULTILINE)
_SPACES: Final = "  "


def read_json(text: str, place: Place) -> Any:
    found, rest = _deepest(parse(text if text.strip() else _EMPTY), place)
    return ABSENT if rest else found.value


def put_json(text: str, place: Place, value: Any) -> str:
    """Set a value; raises ValueError if a step of its place is in no object."""
    text = text if text.strip() else _EMPTY
    node, rest = _deepest(parse(text), place)
    if not rest:
        return (
            text[: node.start]
            + _dump_json(text, _line_indent(text, node.start), value)
            + text[node.end :]
        )
    if node.members is None:
        raise ValueError(f"{rest[0]} stands in no object")
    return _add_member(text, node, str(rest[0]), nest_value(rest[1:], value))


def drop_json(text: str, place: Place) -> str:
    parent, _ = _deepest(parse(text), place[:-1])
    at = next(at for at, (_, name, _) in enumerate(parent.members or ()) if name == place[-1])
    start, end = _span(text, parent, at)
    return text[:start] + text[end:]


def _deepest(node: Node, place: Place) -> tuple[Node, Place]:
    """Return the deepest existing value on the path to a place, and the rest of the path."""
    for number, step in enumerate(place):
        found = [inner for _, name, inner in node.members or () if name == step]
        if not found:
            return node, place[number:]
        node = found[-1]
    return node, ()


def _add_member(text: str, node: Node, name: str, value: Any) -> str:
    members = node.members or []
    start = members[-1][2].end if members else node.start + 1
    indent = _line_indent(text, members[0][0] if members else node.start)
    if not members:
        indent += _unit(text)
    member = f"{json.dumps(name)}: {_dump_json(text, indent, value)}"
    is_inline = members and "\n" not in text[node.start : node.end]
    before = ", " if is_inline else f"{',' if members else ''}\n{indent}"
    after = text[start:]
    if not members and "\n" not in text[node.start : node.end]:
        after = f"\n{_line_indent(text, node.start)}{after.lstrip(' ')}"
    return text[:start] + before + member + after


def _span(text: str, parent: Node, at: int) -> tuple[int, int]:
    """Return the range that removes a member with its comma but no comment."""
    spans = [(start, node.end) for start, _, node in parent.members or ()]
    start, end = spans[at]
    if at + 1 < len(spans):
        comma, after = blank_end(text, end), spans[at + 1][0]
        is_bare = not text[end:comma].strip() and not text[comma + 1 : after].strip()
        return start, after if is_bare else comma + 1
    if at and text[spans[at - 1][1] : start].strip() == ",":
        return spans[at - 1][1], end
    if not at and not text[parent.start + 1 : start].strip():
        return parent.start + 1, end
    return start, end


def _dump_json(text: str, indent: str, value: Any) -> str:
    dumped = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    return dumped.replace("\n", f"\n{indent}")


def _line_indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _unit(text: str) -> str:
    found = _JSON_INDENT.search(text)
    return found[1] if found else _SPACES


def read_toml(text: str, place: Place) -> Any:
    found = get_from_tree(_load_toml(text), place)
    return found if found is ABSENT else _plain_toml(found)


def put_toml(text: str, place: Place, value: Any) -> str:
    document = _load_toml(text)
    put_in_tree(document, place, value)
    return tomlkit.dumps(document)


def drop_toml(text: str, place: Place) -> str:
    document = _load_toml(text)
    drop_from_tree(document, place)
    # tomlkit leaves the blank line before a table, also at the end of the file.
    return tomlkit.dumps(document).rstrip("\n") + text[len(text.rstrip("\n")) :]


def _load_toml(text: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ValueError(str(error)) from error


def _plain_toml(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value


_WIDTH: Final = 4096  # so wide that no line is broken
_YAML_INDENT: Final = 2


def read_yaml(text: str, place: Place) -> Any:
    found = get_from_tree(_load_yaml(text, place), place)
    return found if found is ABSENT else _plain_yaml(found)


def put_yaml(text: str, place: Place, value: Any) -> str:
    document = _load_yaml(text, place)
    put_in_tree(document, place, value)
    return _dump_yaml(document, text)


def drop_yaml(text: str, place: Place) -> str:
    document = _load_yaml(text, place)
    drop_from_tree(document, place)
    return _dump_yaml(document, text) if document else _comments(text)


def _comments(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.lstrip().startswith("#"))


def _load_yaml(text: str, place: Place) -> Any:
    """Return the document; an empty text gives the list or table that the place needs."""
    try:
        document = _yaml().load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if document is None:
        return [] if place and not isinstance(place[0], str) else {}
    return document


def _dump_yaml(document: Any, text: str) -> str:
    yaml, stream = _yaml(), StringIO()
    _, indent, offset = load_yaml_guess_indent(StringIO(text)) if text.strip() else (0, None, None)
    sequence = (offset or 0) + _YAML_INDENT
    yaml.indent(mapping=indent or _YAML_INDENT, sequence=sequence, offset=offset or 0)
    yaml.dump(document, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    return yaml


def _plain_yaml(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain_yaml(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain_yaml(element) for element in value]
    # Scalars keep their style in subclasses.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
