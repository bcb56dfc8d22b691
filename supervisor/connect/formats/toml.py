"""TOML; comments and layout stay. Pure."""

from __future__ import annotations

from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from supervisor.connect.formats import tree
from supervisor.connect.place import ABSENT, Place


def read(text: str, place: Place) -> Any:
    found = tree.get(_loaded(text), place)
    return found if found is ABSENT else _plain(found)


def put(text: str, place: Place, value: Any) -> str:
    document = _loaded(text)
    tree.put(document, place, value)
    return tomlkit.dumps(document)


def drop(text: str, place: Place) -> str:
    document = _loaded(text)
    tree.drop(document, place)
    # The blank line before a table stays behind, at the end of the file too.
    return tomlkit.dumps(document).rstrip("\n") + text[len(text.rstrip("\n")) :]


def _loaded(text: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ValueError(str(error)) from error


def _plain(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value
