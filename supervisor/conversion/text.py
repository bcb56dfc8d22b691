"""Converted settings as the text of `corral.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.items import Table

from supervisor.conversion.converted import Converted


def render(converted: Converted) -> str:
    """Return the text; what has no equivalent stands in comments."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From a {converted.source}."))
    for note in converted.notes:
        document.add(tomlkit.comment(f"Not taken over: {_line(note)}"))
    for key, value in _plain_first(converted.tables):
        document.add(key, _item(value))
    notes = {one.name: one.notes for one in converted.models}
    models = tomlkit.table(is_super_table=True)
    for one in converted.models:
        models.add(one.name, _table(one.table, notes[one.name]))
    if converted.models:
        document.add("models", models)
    return tomlkit.dumps(document)


def _plain_first(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values before tables, as TOML demands."""
    yield from sorted(table.items(), key=lambda item: isinstance(item[1], Mapping))


def _table(values: Mapping[str, Any], notes: tuple[str, ...] = ()) -> Table:
    made = tomlkit.table()
    for note in notes:
        made.add(tomlkit.comment(f"Not taken over: {_line(note)}"))
    for key, value in _plain_first(values):
        made.add(key, _item(value))
    return made


def _item(value: Any) -> Any:
    return _table(value) if isinstance(value, Mapping) else value


def _line(text: str) -> str:
    """Return a text that cannot leave its comment."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
