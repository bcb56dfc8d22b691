"""The presets of llama-server's router mode (`--models-preset FILE.ini`).

Source: llama.cpp, common/preset.cpp and docs: sections are models, `[*]` counts for all; keys are
long or short options or LLAMA_ARG_* variables.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from supervisor.conversion.command_line import ReadCommand
from supervisor.conversion.converted import Converted, ConvertedModel
from supervisor.conversion.flags import ModelOptions
from supervisor.engines.help import Flags, newest_flags
from supervisor.errors import SettingsInvalid

_NAME: Final = "router preset"
_ALL: Final = "*"
_TOP: Final = "\0"  # keys before the first section, such as version
_LOAD: Final = "load-on-startup"
_OF_THE_ROUTER: Final = frozenset({"stop-timeout", "dedup-cache-models"})
_TRUE: Final = frozenset({"1", "true", "on", "enabled"})


def convert(text: str, base: Path, known: Flags | None = None) -> Converted:
    """Convert a preset whose relative paths begin at a directory; `known` as of a command line.

    Raises:
        SettingsInvalid: It is no preset.
    """
    sections = _read(text)
    shared = sections.get(_ALL, {})
    models, omitted = list[ConvertedModel](), list[str]()
    for name, section in sections.items():
        if name in {_ALL, _TOP}:
            continue
        made = _model(name, {**shared, **section}, base, known or newest_flags())
        if isinstance(made, ConvertedModel):
            models.append(made)
        else:
            omitted.append(made)
    return Converted(_NAME, tuple(models), {}, tuple(omitted))


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


def _model(name: str, section: Mapping[str, str], base: Path, known: Flags) -> ConvertedModel | str:
    """Return a model, or a sentence why there is none."""
    options, is_preloaded = ModelOptions(known), False
    for key, value in section.items():
        if key == _LOAD:
            is_preloaded = value.lower() in _TRUE
        elif key in _OF_THE_ROUTER:
            options.omitted.append(f"no equivalent: {key}")
        elif not options.take_variable(key, value):
            options.take(key, value)
    if options.source is None:
        options.take("hf-repo", name)  # a section may be named by the repository
    made = ReadCommand(options, base, "").model(name, preload=is_preloaded)
    return made or f"{name}: {'; '.join(options.omitted) or 'it names no model'}"
