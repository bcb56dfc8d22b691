"""Explains errors in the settings, with the file, the key and the nearest known key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proxy.common.toml_text import table_beside
from proxy.request.variants import MARK
from supervisor.errors import SettingsInvalid, did_you_mean
from supervisor.plan.auto import count_of
from supervisor.plan.loras import LoraSettings
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.settings.tables import CATCH_ALL
from supervisor.system.toml_file import brief

# The new names of renamed settings, by the last part of their table.
_RENAMED: Final = table_beside(__file__)
_LINES_MAX: Final = 20
_TOML_TERMS: Final = {
    "Input should be": "must be",
    "a valid tuple": "an array",
    "a valid list": "an array",
    "a valid dictionary or object to extract fields from": "a table",
    "a valid dictionary": "a table",
}
_TYPE: Final = re.compile(r"\[key\]|constrained-[a-z]+|[a-z-]+\[.*\]", re.DOTALL)


# A key, the error there, whose text begins with the key, and advice.
Problem = tuple[tuple[str, ...], str, str]
_KEEP_ONE: Final = (
    "keep one of them; max_context_length counts tokens of one slot, ctx-size those of all slots "
    "together"
)
READ_AGAIN: Final = "corral config check reads it again"


def explain(error: ValidationError) -> Iterator[Problem]:
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        by_key.setdefault(_key(detail), []).append(detail)
    for number, (key, details) in enumerate(by_key.items()):
        # Finding the nearest known key takes time, and later lines are not shown.
        yield key, _sentence(key, details) if number < _LINES_MAX else "", READ_AGAIN


def refusal(
    problems: Sequence[Problem], place: Callable[[tuple[str, ...]], str]
) -> SettingsInvalid:
    """Return an error with a line for each of the first 20 problems, prefixed by its place."""
    lines = [f"{place(key)}{text}" for key, text, _ in problems[:_LINES_MAX]]
    more = [f"… and {len(problems) - _LINES_MAX} more"] if len(problems) > _LINES_MAX else []
    hints = {hint for _, _, hint in problems}
    hint = hints.pop() if len(hints) == 1 else READ_AGAIN
    return SettingsInvalid("\n".join([*lines, *more]), hint=hint)


def _key(detail: ErrorDetails) -> tuple[str, ...]:
    """Return the parts of a key, without pydantic's names for the types of a union."""
    parts = [str(part) for part in detail["loc"] if part != LoraSettings.__name__]
    while parts and _TYPE.fullmatch(parts[-1]):
        parts.pop()
    return tuple(parts) or ("settings",)


def unknown_tables(merged: Iterable[str]) -> Iterator[Problem]:
    # Settings(**merged) would take names with an underscore as options of pydantic-settings.
    for name in merged:
        if name not in Settings.model_fields:
            known = list(Settings.model_fields)
            yield (name,), _unknown(brief(name, quoted=False), known, name), READ_AGAIN


def conflicts(settings: Settings) -> Iterator[Problem]:
    yield from shared_names(settings.models)
    yield from _unknown_models(settings)
    yield from _fallbacks_of_nodes(settings)
    yield from batching_conflicts(settings.models)
    yield from _workers(settings)
    yield from _groups(settings)


def shared_names(models: Mapping[str, ModelSettings]) -> Iterator[Problem]:
    """Yield aliases and variants with another model's name, or with the same name twice."""
    owners = {name: name for name in models}
    for name, model in models.items():
        further = list(_further_names(name, model))
        for other in further:
            if (owner := owners.setdefault(other, name)) != name:
                yield (
                    ("models", name),
                    f"models.{name}: the name {other} belongs to the model {owner}",
                    "give the alias or the variant a name that no other model has",
                )
        for other in {other for other in further if further.count(other) > 1}:
            yield (
                ("models", name),
                f"models.{name}: the name {other} is given twice",
                "remove one of the aliases, or the alias that is a variant's name",
            )


def _unknown_models(settings: Settings) -> Iterator[Problem]:
    """Yield a default model and fallbacks that do not exist; with nodes, one may have them."""
    if settings.nodes:
        return
    models, known = settings.models, all_names(settings.models)
    named: list[tuple[tuple[str, ...], str]] = []
    if settings.proxy.default_model is not None:
        named.append((("proxy", "default_model"), settings.proxy.default_model))
    for name, model in models.items():
        named += [(("models", name, "fallback"), other) for other in model.fallback]
    for key, other in named:
        if other not in known:
            yield (
                key,
                f"{'.'.join(key)}: no model is named {brief(other, quoted=False)}"
                + did_you_mean(other, known),
                f"models: {', '.join(models) or 'none'}; an alias or a variant will do as well",
            )


def _fallbacks_of_nodes(settings: Settings) -> Iterator[Problem]:
    """Yield entries of `[proxy.fallback]`, which is for models of nodes, for other models."""
    known = all_names(settings.models)
    for name in settings.proxy.fallback:
        if name in known:
            problem = "this machine has a model of that name"
            hint = "set fallback of that model under [models.NAME]"
        elif not settings.nodes:
            problem = "there are no nodes, and no model is named so"
            hint = "add the node that has it as [nodes.NAME], or remove the line"
        else:
            continue
        key = ("proxy", "fallback", name)
        yield key, f"proxy.fallback.{brief(name, quoted=False)}: {problem}", hint


def batching_conflicts(models: Mapping[str, ModelSettings]) -> Iterator[Problem]:
    """Yield options that both `batching` and `flags` of a model set."""
    for name, model in models.items():
        for key, flag in model.batching.conflicts(model.flags):
            both = f"batching.{key} and flags.{brief(flag, quoted=False)}"
            text = f"models.{name}: {both} set the same option of llama-server"
            yield ("models", name, "batching", key), text, _KEEP_ONE


def _workers(settings: Settings) -> Iterator[Problem]:
    for name, model in settings.models.items():
        for worker in model.workers:
            if worker not in settings.workers:
                yield (
                    ("models", name, "workers"),
                    f"models.{name}.workers: no worker is named {worker}"
                    + did_you_mean(worker, settings.workers),
                    f'write [workers.{worker}] with address = "HOST:PORT" or local = true',
                )


def _groups(settings: Settings) -> Iterator[Problem]:
    """Yield models of groups that do not exist, and rules of no effect or against a model."""
    models = settings.models
    for group, table in settings.groups.items():
        for name in table.models:
            if name not in models and not settings.serve_found:
                yield (
                    ("groups", group, "models"),
                    f"groups.{group}.models: no model is named {name}" + did_you_mean(name, models),
                    f"models: {', '.join(models) or 'none'}; an alias will not do",
                )
        limit, there = table.max_loaded, len(table.models)
        if limit and limit >= there:
            yield (
                ("groups", group, "max_loaded"),
                f"groups.{group}.max_loaded = {limit} has no effect: the group has "
                + count_of(there, "model"),
                "set it below the number of models, or remove the line",
            )
    for group, problem in settings.group_rules.contradictions(models):
        hint = "change the group, another group of the same models, or pinned"
        yield ("groups", group), f"groups.{group}: {problem}", hint


def all_names(models: Mapping[str, ModelSettings]) -> set[str]:
    """Return every name under which clients may request these models."""
    further = (name for model in models for name in _further_names(model, models[model]))
    return {*models, *further} - {CATCH_ALL}


def _further_names(name: str, model: ModelSettings) -> Iterator[str]:
    yield from model.aliases
    for base in (name, *model.aliases):
        adapted = [f"{base}{MARK}{adapter}" for adapter in model.loras]
        yield from adapted
        for own_name in (base, *adapted):
            yield from (f"{own_name}:{variant}" for variant in model.variants)


def _in_toml_terms(text: str) -> str:
    """Return a message of pydantic in the terms of the settings file."""
    for python, toml in _TOML_TERMS.items():
        text = text.replace(python, toml)
    return text


def _sentence(parts: tuple[str, ...], details: list[ErrorDetails]) -> str:
    *table, key = parts
    name, first = brief(".".join(parts), quoted=False), details[0]
    if first["type"] == "extra_forbidden":
        if renamed := _RENAMED.get(table[-1] if table else "", {}).get(key):
            return f"{name} was renamed: write {renamed}"
        return _unknown(name, _known_keys(table), key)
    if first["type"] == "missing":
        return f"{name} is missing"
    messages = (detail["msg"].removeprefix("Value error, ") for detail in details)
    reasons = " or ".join(dict.fromkeys(map(_in_toml_terms, messages)))
    # A URL may contain a password; the line of a table shows more than its content in one line.
    is_shown = key != "url" and not isinstance(first["input"], dict)
    return f"{name}: {reasons}" + (f" (it is {brief(first['input'])})" if is_shown else "")


def _unknown(name: str, known: list[str], key: str) -> str:
    return f"{name} is unknown" + did_you_mean(key, known)


def _known_keys(table: list[str]) -> list[str]:
    model: type[BaseModel] = Settings
    parts = iter(table)
    for part in parts:
        found = model.model_fields[part].annotation
        if get_origin(found) is dict:
            next(parts)  # the name of a model or a node
            found = get_args(found)[1]
        if get_origin(found) in {UnionType, Union}:  # a table that may be missing, or be a path
            found = next(kind for kind in get_args(found) if _is_table(kind))
        assert isinstance(found, type)  # noqa: S101 (for mypy)
        assert issubclass(found, BaseModel)  # noqa: S101 (for mypy)
        model = found
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
