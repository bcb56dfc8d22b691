"""YAML; comments, quotes and indentation stay. Pure."""

from __future__ import annotations

from io import StringIO
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from supervisor.connect.formats import tree
from supervisor.connect.place import ABSENT, Item, Place

_WIDTH: Final = 4096  # lines are not broken
_INDENT: Final = 2


def read(text: str, place: Place) -> Any:
    found = tree.get(_loaded(text, place), place)
    return found if found is ABSENT else _plain(found)


def put(text: str, place: Place, value: Any) -> str:
    document = _loaded(text, place)
    tree.put(document, place, value)
    return _dumped(document, text)


def drop(text: str, place: Place) -> str:
    document = _loaded(text, place)
    tree.drop(document, place)
    return _dumped(document, text) if document else _comments(text)


def _comments(text: str) -> str:
    """Return the lines of a text that are comments."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.lstrip().startswith("#"))


def _loaded(text: str, place: Place) -> Any:
    """Return the document; an empty one is what the place begins with."""
    try:
        document = _yaml().load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if document is None:
        return [] if place and isinstance(place[0], Item) else {}
    return document


def _dumped(document: Any, text: str) -> str:
    yaml, stream = _yaml(), StringIO()
    _, indent, offset = load_yaml_guess_indent(StringIO(text)) if text.strip() else (0, None, None)
    sequence = (offset or 0) + _INDENT
    yaml.indent(mapping=indent or _INDENT, sequence=sequence, offset=offset or 0)
    yaml.dump(document, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    return yaml


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    # Scalars keep their style in subclasses.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
