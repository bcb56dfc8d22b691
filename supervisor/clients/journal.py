"""Changes settings files of clients in place, and remembers the changes to take them back. Pure.

The formats are JSON, TOML, YAML and NAME=VALUE. JSON may have comments (`//`, `/* */`) and a comma
after the last member, as Zed and opencode allow.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tomlkit
from pydantic import TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent
from tomlkit.exceptions import TOMLKitError

from supervisor.clients import programs


def get_from_tree(tree: Any, place: programs.Place) -> Any:
    """Return the value at a place, or ABSENT."""
    for step in place:
        if (key := _key(tree, step)) is programs.ABSENT:
            return programs.ABSENT
        tree = tree[key]
    return tree


def put_in_tree(tree: Any, place: programs.Place, value: Any) -> None:
    """Set a value; make the tables and lists that lead to it."""
    for number, step in enumerate(place):
        key, rest = _key(tree, step), place[number + 1 :]
        if key is programs.ABSENT:
            value = programs.nest_value(rest, value)
            if isinstance(step, str):
                tree[step] = value
            else:
                tree.append(value)
            return
        if not rest:
            tree[key] = value
            return
        tree = tree[key]


def drop_from_tree(tree: Any, place: programs.Place) -> None:
    """Remove a value that is there."""
    *way, last = place
    parent = get_from_tree(tree, tuple(way))
    del parent[_key(parent, last)]


def _key(tree: Any, step: programs.Step) -> Any:
    """Return the key or index of a step, or ABSENT; raises TypeError for another kind of value."""
    if isinstance(step, str):
        if not isinstance(tree, MutableMapping):
            raise TypeError(f"{step} stands in no table")
        return step if step in tree else programs.ABSENT
    if not isinstance(tree, MutableSequence):
        raise TypeError(f"{step[1]} stands in no list")
    name, value = step
    items = (at for at, item in enumerate(tree) if isinstance(item, MutableMapping))
    return next((at for at in items if tree[at].get(name) == value), programs.ABSENT)


_LINE: Final = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read_env(text: str, place: programs.Place) -> Any:
    """Return the last value of a name, as a shell would."""
    found = [match[2] for line in text.splitlines() if (match := _match_name(line, place))]
    return "".join(shlex.split(found[-1])) if found else programs.ABSENT


def put_env(text: str, place: programs.Place, value: Any) -> str:
    line = f"{place[0]}={shlex.quote(str(value))}"
    if read_env(text, place) is programs.ABSENT:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{line}\n"
    return _join_lines(
        [line if _match_name(old_line, place) else old_line for old_line in text.splitlines()]
    )


def drop_env(text: str, place: programs.Place) -> str:
    return _join_lines([line for line in text.splitlines() if not _match_name(line, place)])


def _match_name(line: str, place: programs.Place) -> re.Match[str] | None:
    found = _LINE.fullmatch(line)
    return found if found and found[1] == place[0] else None


def _join_lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# Also a broken string, which the decoder refuses.
_STRING: Final = r'"(?:[^"\\\n]|\\.)*+"?+'
_STRINGS_AND_COMMENTS: Final = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
# A comma after the last member or item; strings are skipped.
_LAST_COMMA: Final = re.compile(rf"({_STRING}|[\]}}\w])(\s*),(?=\s*[\]}}])|{_STRING}")
_DECODER: Final = json.JSONDecoder()
_EMPTY: Final = "{\n}\n"
_JSON_INDENT: Final = re.compile(r'^([ \t]+)"', re.MULTILINE)
_SPACES: Final = "  "


def read_json(text: str, place: programs.Place) -> Any:
    plain = _plain_json(text)
    start, end, rest = _deepest(plain, place)
    return programs.ABSENT if rest else json.loads(plain[start:end])


def put_json(text: str, place: programs.Place, value: Any) -> str:
    """Set a value; raises ValueError if a step of its place is in no object."""
    text = text if text.strip() else _EMPTY
    plain = _plain_json(text)
    start, end, rest = _deepest(plain, place)
    if not rest:
        return text[:start] + _dump_json(text, _line_indent(text, start), value) + text[end:]
    if plain[start] != "{":
        raise ValueError(f"{rest[0]} stands in no object")
    members, is_inline = _members(plain, start), "\n" not in text[start:end]
    at = members[-1][3] if members else start + 1
    indent = (
        _line_indent(text, members[0][0]) if members else _line_indent(text, start) + _unit(text)
    )
    value = programs.nest_value(rest[1:], value)
    member = f"{json.dumps(rest[0])}: {_dump_json(text, indent, value)}"
    before = ", " if members and is_inline else f"{',' if members else ''}\n{indent}"
    after = text[at:]
    if is_inline and not members:
        after = f"\n{_line_indent(text, start)}{after.lstrip(' ')}"
    return text[:at] + before + member + after


def drop_json(text: str, place: programs.Place) -> str:
    """Remove a member with its comma, but no comment."""
    plain = _plain_json(text)
    parent = _deepest(plain, place[:-1])[0]
    members = _members(plain, parent)
    number = next(number for number, member in enumerate(members) if member[1] == place[-1])
    start, _, _, end = members[number]
    before = members[number - 1][3] if number else parent + 1
    if number + 1 < len(members):
        comma, after = _skip_blanks(plain, end), members[number + 1][0]
        is_bare = not (text[end:comma] + text[comma + 1 : after]).strip()
        end = after if is_bare else comma + 1
    elif text[before:start].strip() == ("," if number else ""):
        start = before
    return text[:start] + text[end:]


def _plain_json(text: str) -> str:
    """Return JSON with each value at its place: comments and last commas become blanks.

    Raises ValueError, with the line.
    """
    if not text.strip():
        return _EMPTY
    bare = _STRINGS_AND_COMMENTS.sub(
        lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text
    )
    plain = _LAST_COMMA.sub(lambda found: f"{found[1]}{found[2]} " if found[1] else found[0], bare)
    try:
        json.loads(plain)
    except RecursionError as error:
        raise ValueError("line 1: too many levels") from error
    return plain


def _skip_blanks(plain: str, at: int) -> int:
    while plain[at].isspace():
        at += 1
    return at


def _members(plain: str, at: int) -> list[tuple[int, str, int, int]]:
    """Return the members of the value at a position: start, name, and the value's range."""
    members: list[tuple[int, str, int, int]] = []
    if plain[at] != "{":
        return members
    at = _skip_blanks(plain, at + 1)
    while plain[at] != "}":
        name, colon = _DECODER.raw_decode(plain, at)
        start = _skip_blanks(plain, _skip_blanks(plain, colon) + 1)
        end = _DECODER.raw_decode(plain, start)[1]
        members.append((at, name, start, end))
        at = _skip_blanks(plain, end)
        if plain[at] == ",":
            at = _skip_blanks(plain, at + 1)
    return members


def _deepest(plain: str, place: programs.Place) -> tuple[int, int, programs.Place]:
    """Return the range of the deepest value on the path to a place, and the rest of the path."""
    start, end = _skip_blanks(plain, 0), len(plain.rstrip())
    for number, step in enumerate(place):
        found = [member for member in _members(plain, start) if member[1] == step]
        if not found:
            return start, end, place[number:]
        _, _, start, end = found[-1]
    return start, end, ()


def _dump_json(text: str, indent: str, value: Any) -> str:
    return json.dumps(value, indent=_unit(text), ensure_ascii=False).replace("\n", f"\n{indent}")


def _line_indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _unit(text: str) -> str:
    found = _JSON_INDENT.search(text)
    return found[1] if found else _SPACES


# Functions of a format: they return the value at a place or ABSENT, the text with a value there and
# the text without the value there, which must exist. All raise ValueError for a text of another
# format, TypeError for an impossible place.
Texts = tuple[
    Callable[[str, programs.Place], Any],
    Callable[[str, programs.Place, Any], str],
    Callable[[str, programs.Place], str],
]


def _tree_texts(
    load: Callable[[str, programs.Place], Any],
    plain: Callable[[Any], Any],
    dump: Callable[[Any, str], str],
) -> Texts:
    """Return the functions of a format whose texts a library loads as trees and dumps again."""

    def read(text: str, place: programs.Place) -> Any:
        found = get_from_tree(load(text, place), place)
        return found if found is programs.ABSENT else plain(found)

    def put(text: str, place: programs.Place, value: Any) -> str:
        document = load(text, place)
        put_in_tree(document, place, value)
        return dump(document, text)

    def drop(text: str, place: programs.Place) -> str:
        document = load(text, place)
        drop_from_tree(document, place)
        return dump(document, text)

    return read, put, drop


def _load_toml(text: str, _: programs.Place) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ValueError(str(error)) from error


_WIDTH: Final = 4096  # so wide that no line is broken
_YAML_INDENT: Final = 2


def _plain_toml(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value


def _dump_toml(document: tomlkit.TOMLDocument, text: str) -> str:
    # tomlkit leaves the blank line before a removed table, also at the end of the file.
    return tomlkit.dumps(document).rstrip("\n") + (text[len(text.rstrip("\n")) :] or "\n")


def _load_yaml(text: str, place: programs.Place) -> Any:
    """Return the document; an empty text gives the list or table that the place needs."""
    try:
        document = _yaml().load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if document is None:
        return [] if place and not isinstance(place[0], str) else {}
    return document


def _dump_yaml(document: Any, text: str) -> str:
    if not document:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if line.lstrip().startswith("#"))
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


TEXTS: Final[Mapping[programs.FileFormat, Texts]] = MappingProxyType(
    {
        "json": (read_json, put_json, drop_json),
        "toml": _tree_texts(_load_toml, _plain_toml, _dump_toml),
        "yaml": _tree_texts(_load_yaml, _plain_yaml, _dump_yaml),
        "env": (read_env, put_env, drop_env),
    }
)


def text_of(settings: programs.FileSettings) -> str:
    """Return the text of a new file with these settings."""
    text, (_, put, _) = "", TEXTS[settings.format]
    for place, value in {**settings.defaults, **settings.values}.items():
        text = put(text, place, value)
    return text


def rule_command(client: str, rules: Sequence[str]) -> str:
    """Return the commands that set a client's prompt rules and take them back."""
    from supervisor.settings.edit import key_text  # noqa: PLC0415 (tomlkit takes memory)

    key = key_text(("proxy", "prompt_rules", client))
    names = ", ".join(f'"{rule}"' for rule in rules)
    return f"corral config set '{key}' '[{names}]' (corral config unset '{key}' undoes it)"


def rule_notes(client: programs.ClientProgram, facts: programs.Facts) -> Sequence[str]:
    """Return an offer of a client's prompt rules, unless it has some or needs none."""
    if not client.prompt_rules or client.agent in facts.ruled:
        return ()
    command = rule_command(client.agent, client.prompt_rules)
    return (f"to let its sessions share more of their prompts: {command}",)


def notes_of(client: programs.ClientProgram, facts: programs.Facts) -> Sequence[str]:
    """Return what else the user must do, a sentence each."""
    notes = []
    model = facts.model
    if model.context_tokens is not None and model.context_tokens < client.context_least:
        from supervisor.settings.edit import key_text  # noqa: PLC0415 (tomlkit takes memory)

        flags = key_text(("models", model.name, "flags"))
        notes.append(
            f"{model.name} has a context of {model.context_tokens} tokens, and the prompt of "
            f"{client.title} takes some 10000: choose a model with {client.context_least} or more, "
            f"or raise ctx-size under [{flags}] if the model was trained for it"
        )
    if facts.needs_key:
        same = client.key_variable == programs.KEY_VARIABLE
        source = "" if same else f' (export {client.key_variable}="${programs.KEY_VARIABLE}")'
        notes.append(f"{client.title} reads the API key from {client.key_variable}{source}")
    if facts.certificate and not client.writes_ca:
        notes.append(
            f"{client.title} must trust the certificate: "
            f"export {client.ca_variable}={facts.certificate}"
        )
    elif facts.url.startswith("https:") and not facts.certificate:
        notes.append(
            "if no public CA issued the certificate, the client must trust the CA that did: "
            f"export {client.ca_variable}=FILE.pem"
        )
    return notes


@dataclass(frozen=True, slots=True)
class Entry:
    place: programs.Place
    written: Any
    before: tuple[Any, ...]  # the file's value before; empty if it had none
    kept: int  # how many steps of the place existed before
    # The file needs some value here; it is removed only if nothing else remains.
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The written values of one file; `is_new` if we made the file."""

    path: Path
    format: programs.FileFormat
    entries: tuple[Entry, ...]
    is_new: bool


def apply_file_settings(
    text: str, wanted: programs.FileSettings, earlier: FileEntries | None, *, is_new: bool
) -> tuple[str, FileEntries]:
    """Return the text with the wanted values, and the entries to remember; raises ValueError.

    Values of an earlier call are taken back first, so that the values before it are remembered.
    """
    if earlier:
        text, is_new = undo_entries(text, earlier)[0], earlier.is_new
    entries, (read, put, _) = [], TEXTS[wanted.format]
    places = wanted.defaults.items()
    defaults = {place: value for place, value in places if read(text, place) is programs.ABSENT}
    for place, value in {**defaults, **wanted.values}.items():
        now, depths = read(text, place), range(len(place), 0, -1)
        kept = next(
            (depth for depth in depths if read(text, place[:depth]) is not programs.ABSENT), 0
        )
        before = () if now is programs.ABSENT else (now,)
        entries.append(Entry(place, value, before, kept, is_default=place in defaults))
        text = put(text, place, value)
    return text, FileEntries(wanted.path, wanted.format, tuple(entries), is_new)


def undo_entries(text: str, written: FileEntries) -> tuple[str, tuple[programs.Place, ...]]:
    """Take back the written values; return the text, and the places changed since, which stay.

    Raises ValueError.
    """
    ours = [entry for entry in reversed(written.entries) if not entry.is_default]
    defaults = [entry for entry in written.entries if entry.is_default]
    text, left = _undo_each(text, written, ours)
    bare, _ = _undo_each(text, written, defaults)
    return (bare if is_empty(bare) or not written.is_new else text), left


def _undo_each(
    text: str, written: FileEntries, entries: Sequence[Entry]
) -> tuple[str, tuple[programs.Place, ...]]:
    left, (read, put, _) = list[programs.Place](), TEXTS[written.format]
    for entry in entries:
        now = read(text, entry.place)
        if now is programs.ABSENT:
            continue
        if now != entry.written:
            left.append(entry.place)
        elif entry.before:
            text = put(text, entry.place, entry.before[0])
        else:
            text = _remove_entry(TEXTS[written.format], text, entry)
    return text, tuple(left)


def is_empty(text: str) -> bool:
    """Return whether a file has no values, in any of the formats."""
    return "".join(text.split()) in {"", "{}", "[]"}


def _remove_entry(texts: Texts, text: str, entry: Entry) -> str:
    """Remove a value, and the tables that led to it and are empty now."""
    read, _, drop = texts
    text = drop(text, entry.place)
    for depth in range(len(entry.place) - 1, entry.kept, -1):
        if read(text, entry.place[:depth]) not in ({}, []):
            break
        text = drop(text, entry.place[:depth])
    return text


# Converts the entries of a client's files to JSON, and back.
JOURNAL: Final = TypeAdapter(list[FileEntries])
