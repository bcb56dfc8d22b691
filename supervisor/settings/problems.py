"""What is wrong with settings, in sentences that name the key and the nearest one that there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from supervisor.errors import SettingsInvalid
from supervisor.settings.model import ModelRestartTable, ModelTable
from supervisor.settings.root import Settings
from supervisor.settings.tables import NodeTable, ProxyTable, RestartTable, SupervisorTable


def explain(error: ValidationError, path: Path | None) -> str:
    """Return a line for each thing that does not fit a table."""
    where = f"{path}: " if path else ""
    return "\n".join(f"{where}{_sentence(detail)}" for detail in error.errors())


def check_names(models: Mapping[str, ModelTable], path: Path | None) -> None:
    """Refuse a name that clients could mean two models by.

    Raises:
        SettingsInvalid: An alias or a variant has the name of something else.
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


def _further_names(name: str, model: ModelTable) -> Iterator[str]:
    yield from model.aliases
    for base in (name, *model.aliases):
        yield from (f"{base}:{variant}" for variant in model.variants)


def _sentence(detail: ErrorDetails) -> str:
    *table, key = [str(part) for part in detail["loc"]]
    name = ".".join([*table, key])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(table), n=1)
        return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    if detail["type"] == "missing":
        return f"{name} is missing"
    sentence = f"{name.removesuffix('.[key]')}: {detail['msg']}"
    # An address may hold a password.
    return sentence if key == "url" else f"{sentence} (it is {detail['input']!r})"


def _known_keys(table: list[str]) -> list[str]:
    tables: dict[str, type[BaseModel]] = {
        "": Settings,
        "proxy": ProxyTable,
        "supervisor": SupervisorTable,
        "supervisor.restart": RestartTable,
    }
    in_model = ModelRestartTable if table[2:] == ["restart"] else ModelTable
    if table[:1] == ["nodes"]:
        return list(NodeTable.model_fields)
    return list(tables.get(".".join(table), in_model).model_fields)
