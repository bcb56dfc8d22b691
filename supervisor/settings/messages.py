"""Error messages for settings: they name the file, the key and the nearest known key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.adapter import MARK
from supervisor.errors import SettingsInvalid
from supervisor.flags.loras import LoraSettings
from supervisor.host.toml_file import QUOTED_MAX, brief
from supervisor.settings.renamed import new_name
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.settings.types import CATCH_ALL

_LINES_MAX: Final = 20
_TYPE: Final = re.compile(r"\[key\]|constrained-[a-z]+|[a-z-]+\[.*\]", re.DOTALL)


def explain(error: ValidationError, path: Path | None) -> str:
    """Return a line for each wrong key, twenty at most."""
    where = f"{path}: " if path else ""
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        by_key.setdefault(_key(detail), []).append(detail)
    lines = [f"{where}{_sentence(key, by_key[key])}" for key in list(by_key)[:_LINES_MAX]]
    more = len(by_key) - len(lines)
    return "\n".join([*lines, *([f"… and {more} more"] if more else [])])


def _key(detail: ErrorDetails) -> tuple[str, ...]:
    """Return the parts of a key, without those with which pydantic names the types of a union."""
    parts = [str(part) for part in detail["loc"] if part != LoraSettings.__name__]
    while parts and _TYPE.fullmatch(parts[-1]):
        parts.pop()
    return tuple(parts) or ("settings",)


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
        SettingsInvalid: An alias or a variant has another model's name, or both have the same.
    """
    owners = {name: name for name in models}
    where = f"{path}: " if path else ""
    for name, model in models.items():
        further = list(_further_names(name, model))
        for other in further:
            if (owner := owners.setdefault(other, name)) != name:
                raise SettingsInvalid(
                    f"{where}models.{name}: the name {other} belongs to the model {owner}",
                    hint="give the alias or the variant a name that no other model has",
                )
            if further.count(other) > 1:
                raise SettingsInvalid(
                    f"{where}models.{name}: the name {other} is given twice",
                    hint="remove one of the aliases, or the alias that is a variant's name",
                )


def check_default_model(settings: Settings, path: Path | None) -> None:
    """Reject a default model that there is not; a node may have it.

    Raises:
        SettingsInvalid: No model here has the name, and there are no nodes.
    """
    default, models = settings.proxy.default_model, settings.models
    known = all_names(models)
    if default is None or default in known or settings.nodes:
        return
    near = difflib.get_close_matches(default, known, n=1)
    raise SettingsInvalid(
        f"{f'{path}: ' if path else ''}proxy.default_model: no model is named "
        f"{brief(default, quoted=False)}" + (f"; did you mean {near[0]}?" if near else ""),
        hint=f"models: {', '.join(models) or 'none'}; an alias or a variant will do as well",
    )


def check_fallbacks(settings: Settings, path: Path | None) -> None:
    """Reject a fallback to a model that there is not; a node may have it.

    Raises:
        SettingsInvalid: No model here has the name, and there are no nodes.
    """
    known = all_names(settings.models)
    for name, model in settings.models.items():
        for other in () if settings.nodes else model.fallback:
            if other not in known:
                near = difflib.get_close_matches(other, known, n=1)
                raise SettingsInvalid(
                    f"{f'{path}: ' if path else ''}models.{name}.fallback: no model is named "
                    f"{brief(other, quoted=False)}"
                    + (f"; did you mean {near[0]}?" if near else ""),
                    hint=f"models: {', '.join(settings.models)}; an alias or a variant will do "
                    "as well",
                )


def check_fallbacks_of_nodes(settings: Settings, path: Path | None) -> None:
    """Reject a fallback under `[proxy.fallback]` of a model that is not a node's.

    Raises:
        SettingsInvalid: The model is one of this machine, or there are no nodes.
    """
    known = all_names(settings.models)
    for name in settings.proxy.fallback:
        at = f"{f'{path}: ' if path else ''}proxy.fallback.{brief(name, quoted=False)}"
        if name in known:
            raise SettingsInvalid(
                f"{at}: this machine has a model of that name",
                hint="set fallback of that model under [models.NAME]",
            )
        if not settings.nodes:
            raise SettingsInvalid(
                f"{at}: there are no nodes, and no model is named so",
                hint="add the node that has it as [nodes.NAME], or remove the line",
            )


def check_batching(models: Mapping[str, ModelSettings], path: Path | None) -> None:
    """Reject an option that `batching` and `flags` of a model both set.

    Raises:
        SettingsInvalid: There is one.
    """
    for name, model in models.items():
        for key, flag in model.batching.conflicts(model.flags):
            raise SettingsInvalid(
                f"{f'{path}: ' if path else ''}models.{name}: batching.{key} and "
                f"flags.{brief(flag, quoted=False)} set the same option of llama-server",
                hint="keep one of them; max_context_length counts tokens of one slot, ctx-size "
                "those of all slots together",
            )


def check_workers(settings: Settings, path: Path | None) -> None:
    """Reject a model with a worker that there is not.

    Raises:
        SettingsInvalid: There is one.
    """
    for name, model in settings.models.items():
        for worker in model.workers:
            if worker not in settings.workers:
                near = difflib.get_close_matches(worker, settings.workers, n=1)
                raise SettingsInvalid(
                    f"{f'{path}: ' if path else ''}models.{name}.workers: no worker is named "
                    f"{worker}" + (f"; did you mean {near[0]}?" if near else ""),
                    hint=f'write [workers.{worker}] with address = "HOST:PORT" or local = true',
                )


def all_names(models: Mapping[str, ModelSettings]) -> set[str]:
    """Return every name by which clients may ask for these models."""
    further = (name for one in models for name in _further_names(one, models[one]))
    return {*models, *further} - {CATCH_ALL}


def _further_names(name: str, model: ModelSettings) -> Iterator[str]:
    yield from model.aliases
    for base in (name, *model.aliases):
        adapted = [f"{base}{MARK}{adapter}" for adapter in model.loras]
        yield from adapted
        for one in (base, *adapted):
            yield from (f"{one}:{variant}" for variant in model.variants)


def _sentence(parts: tuple[str, ...], details: list[ErrorDetails]) -> str:
    *table, key = parts
    name, first = brief(".".join(parts), quoted=False), details[0]
    if first["type"] == "extra_forbidden":
        if renamed := new_name(table[-1] if table else "", key):
            return f"{name} was renamed: write {renamed}"
        return _unknown(name, _known_keys(table), key)
    if first["type"] == "missing":
        return f"{name} is missing"
    reasons = " or ".join(dict.fromkeys(map(_reason, details)))
    # A URL may contain a password.
    return f"{name}: {reasons}" + ("" if key == "url" else f" (it is {brief(first['input'])})")


def _reason(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


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
        if get_origin(found) in {UnionType, Union}:  # a table that may be missing, or be a path
            found = next(one for one in get_args(found) if _is_table(one))
        assert isinstance(found, type)  # noqa: S101 (for mypy)
        assert issubclass(found, BaseModel)  # noqa: S101 (for mypy)
        model = found
    return list(model.model_fields)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
