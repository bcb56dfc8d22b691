"""Converted settings as the text of `corral.toml`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.items import Comment, Table

from supervisor.conversion.converted import Converted


def render(converted: Converted) -> str:
    """Return the text; what is not taken over, and what is to be known, stands in comments."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From a {converted.source}."))
    for comment in _comments(converted.omitted, converted.notes):
        document.add(comment)
    for key, value in _plain_first(converted.tables):
        document.add(key, _item(value))
    models = tomlkit.table(is_super_table=True)
    for model in converted.models:
        models.add(model.name, _table(model.table, _comments(model.omitted, model.notes)))
    if converted.models:
        document.add("models", models)
    return tomlkit.dumps(document)


def _plain_first(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values before tables, as TOML demands."""
    yield from sorted(table.items(), key=lambda item: isinstance(item[1], Mapping))


def _comments(omitted: Iterable[str], notes: Iterable[str]) -> Iterator[Comment]:
    for sentence in omitted:
        yield tomlkit.comment(f"Not taken over: {_line(sentence)}")
    for sentence in notes:
        yield tomlkit.comment(f"Note: {_line(sentence)}")


def _table(values: Mapping[str, Any], comments: Iterable[Comment] = ()) -> Table:
    made = tomlkit.table()
    for comment in comments:
        made.add(comment)
    for key, value in _plain_first(values):
        made.add(key, _item(value))
    return made


def _item(value: Any) -> Any:
    return _table(value) if isinstance(value, Mapping) else value


def _line(text: str) -> str:
    """Return a text that cannot leave its comment."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
