"""The presets of llama-server's router mode (`--models-preset FILE.ini`).

Source: llama.cpp, common/preset.cpp and docs: sections are models, `[*]` counts for all; keys are
long or short options or LLAMA_ARG_* variables.
"""

from __future__ import annotations

import configparser
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from supervisor.conversion.command_line import converted_model
from supervisor.conversion.converted import Converted, ConvertedModel
from supervisor.conversion.flags import ModelOptions
from supervisor.engines.help import newest_flags
from supervisor.errors import SettingsInvalid

_NAME: Final = "router preset"
_ALL: Final = "*"
_TOP: Final = "\0"  # keys before the first section, such as version
_LOAD: Final = "load-on-startup"
_OF_THE_ROUTER: Final = frozenset({"stop-timeout", "dedup-cache-models"})
_TRUE: Final = frozenset({"1", "true", "on", "enabled"})


def convert(text: str, base: Path) -> Converted:
    """Convert a preset whose relative paths begin at a directory. Raises SettingsInvalid."""
    sections = _read(text)
    shared = sections.get(_ALL, {})
    models, notes = [], []
    for name, section in sections.items():
        if name in {_ALL, _TOP}:
            continue
        made = _model(name, {**shared, **section}, base)
        models += [made] if made.table.get("path") else []
        notes += [] if made.table.get("path") else [f"{name}: {'; '.join(made.notes)}"]
    return Converted(_NAME, tuple(models), {}, tuple(notes))


def _read(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(
        delimiters=("=",), comment_prefixes=("#", ";"), strict=False, default_section="\1"
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    try:
        parser.read_string(f"[{_TOP}]\n{text}")
    except configparser.Error as error:
        first, *_ = str(error).splitlines()
        raise SettingsInvalid(f"this is not an INI file: {first}") from error
    return {name: dict(parser[name]) for name in parser.sections()}


def _model(name: str, section: Mapping[str, str], base: Path) -> ConvertedModel:
    options = ModelOptions()
    more: dict[str, Any] = {"preload": False}
    for key, value in section.items():
        if key == _LOAD:
            more["preload"] = value.lower() in _TRUE
        elif key in _OF_THE_ROUTER:
            options.notes.append(f"no equivalent: {key}")
        else:
            options.take(_option(key), value)
    if options.path is None:
        notes = options.notes or [f"it names no file; corral model get {name} downloads it"]
        return ConvertedModel(name, {}, tuple(notes))
    return converted_model(name, options, base, **more)


def _option(key: str) -> str:
    """Return the option that a key names; a variable names it by its own name."""
    return next(iter(_named_by(key, newest_flags().entries)), key)


def _named_by(variable: str, flags: Iterable[Any]) -> Iterator[str]:
    yield from (flag.key for flag in flags if flag.env == variable)
