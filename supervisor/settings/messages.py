"""Error messages for settings: they name the file, the key and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from supervisor.errors import SettingsInvalid
from supervisor.host.toml_file import QUOTED_MAX, brief
from supervisor.settings.renamed import new_name
from supervisor.settings.schema import ModelSettings, Settings

_LINES_MAX: Final = 20


def explain(error: ValidationError, path: Path | None) -> str:
    """Return a line for each error, twenty at most."""
    where = f"{path}: " if path else ""
    details = error.errors(include_url=False, include_context=False)
    lines = [f"{where}{_sentence(detail)}" for detail in details[:_LINES_MAX]]
    more = len(details) - len(lines)
    return "\n".join([*lines, *([f"… and {more} more"] if more else [])])


def check_tables(merged: Mapping[str, object], path: Path | None) -> None:
    """Reject an unknown table.

    Raises:
        SettingsInvalid: There is one.
    """
    # Settings(**merged) would take names with an underscore as options of pydantic-settings.
    for name in merged.keys() - Settings.model_fields.keys():
        where = f"{path}: " if path else ""
        raise SettingsInvalid(
            where + _unknown(brief(name, quoted=False), list(Settings.model_fields), name),
            hint="corral config check reads it again",
        )


def check_names(models: Mapping[str, ModelSettings], path: Path | None) -> None:
    """Reject a name of two models.

    Raises:
        SettingsInvalid: An alias or a variant has another model's name.
    """
    owners = {name: name for name in models}
    for name, model in models.items():
        for other in _further_names(name, model):
            if (owner := owners.setdefault(other, name)) != name:
                raise SettingsInvalid(
                    f"{f'{path}: ' if path else ''}models.{name}: the name {other} "
                    f"belongs to the model {owner}",
                    hint="give the alias or the variant a name that no other model has",
                )


def _further_names(name: str, model: ModelSettings) -> Iterator[str]:
    yield from model.aliases
    for base in (name, *model.aliases):
        yield from (f"{base}:{variant}" for variant in model.variants)


def _sentence(detail: ErrorDetails) -> str:
    *table, key = [str(part) for part in detail["loc"]] or ["settings"]
    name = brief(".".join([*table, key]), quoted=False)
    if detail["type"] == "extra_forbidden":
        if renamed := new_name(table[-1] if table else "", key):
            return f"{name} was renamed: write {renamed}"
        return _unknown(name, _known_keys(table), key)
    if detail["type"] == "missing":
        return f"{name} is missing"
    sentence = f"{name.removesuffix('.[key]')}: {detail['msg']}"
    # An address may hold a password.
    return sentence if key == "url" else f"{sentence} (it is {brief(detail['input'])})"


def _unknown(name: str, known: list[str], key: str) -> str:
    near = difflib.get_close_matches(key, known, n=1) if len(key) <= QUOTED_MAX else []
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def _known_keys(table: list[str]) -> list[str]:
    model: type[BaseModel] = Settings
    parts = iter(table)
    for part in parts:
        found = model.model_fields[part].annotation
        if get_origin(found) is dict:
            next(parts)  # the name of a model or a node
            found = get_args(found)[1]
        assert isinstance(found, type)  # noqa: S101 (for mypy)
        assert issubclass(found, BaseModel)  # noqa: S101 (for mypy)
        model = found
    return list(model.model_fields)
