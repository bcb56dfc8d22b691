"""Handles the files that a model's flags name, and LoRA adapters that requests choose by name.

The recorded help texts tell which options take files: `--lora FNAME`. An engine would resolve a
relative path in its own working directory, not in the user's.

An engine loads all adapters of `[models.NAME.loras]` with scale 0, so that requests that name none,
such as health checks, are computed without. The prompt cache in main memory is then off, because
the engine finds prompts by their tokens, no matter which adapter computed them (build 10434: it
reused 145 of 146 tokens of another adapter's prompt, and the text differed). Slot files replace it.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from proxy.common.toml_types import ExpandedPath, SettingsTable
from supervisor.builds.help import Flag, FlagValue, recorded_flag
from supervisor.errors import SettingsInvalid
from supervisor.models.metadata import Gguf
from supervisor.plan.setting import CORRAL, Setting
from supervisor.system.files import NotRegular, expand_home, stat_regular

_MANY: Final = "comma-separated"
# Engines create these.
_CREATED: Final = frozenset({"lookup-cache-dynamic", "log-prompts-dir"})


def absolute(flags: Mapping[str, FlagValue], base: Path) -> dict[str, FlagValue]:
    """Expand `~` in the paths of flags, and join relative paths to a directory."""
    return with_paths(flags, lambda path: base / expand_home(path))


def with_paths(
    flags: Mapping[str, FlagValue], change: Callable[[Path], Path]
) -> dict[str, FlagValue]:
    return {
        name: _map_paths(value, flag, change)
        if isinstance(value, str) and (flag := _file_flag(name))
        else value
        for name, value in flags.items()
    }


def check_files(model: str, flags: Mapping[str, FlagValue], own: Mapping[str, FlagValue]) -> None:
    """Check files in flags; those not in `own` are a trial's. Raises SettingsInvalid."""
    for name, value in flags.items():
        flag = _file_flag(name) if isinstance(value, str) else None
        if flag is None or flag.key in _CREATED:
            continue
        is_directory = flag.key.endswith(("-dir", "-path"))
        for path in _paths(str(value), flag):
            if reason := _problem(path, is_directory=is_directory):
                table = "flags" if own.get(name) == value else "trial.flags"
                raise SettingsInvalid(
                    f"models.{model}.{table}.{name}: {path} {reason}",
                    hint="correct the path; a relative one starts at the directory of the settings "
                    "file",
                )


def _file_flag(name: str) -> Flag | None:
    flag = recorded_flag(name)
    return flag if flag and (flag.kind == "path" or _is_scaled(flag)) else None


def _is_scaled(flag: Flag) -> bool:
    return flag.hint is not None and flag.hint.startswith("FNAME:SCALE")


def files_of(option: str, value: str) -> list[Path]:
    """Return the files that the value of an option names, without their scales."""
    flag = _file_flag(option)
    return _paths(value, flag) if flag else []


def _paths(value: str, flag: Flag) -> list[Path]:
    found: list[Path] = []

    def note(path: Path) -> Path:
        found.append(path)
        return path

    _map_paths(value, flag, note)
    return found


def _map_paths(value: str, flag: Flag, change: Callable[[Path], Path]) -> str:
    if not (_is_scaled(flag) or _MANY in flag.help):
        return str(change(Path(value))) if value else value
    items = []
    for item in _split(value):
        path, colon, scale = item.rpartition(":") if _is_scaled(flag) else (item, "", "")
        items.append(f"{change(Path(path))}{colon}{scale}" if path else item)
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(items)
    return line.getvalue()


def _split(value: str) -> list[str]:
    """Split at commas outside double quotes. Source: llama.cpp, common/arg.cpp, parse_csv_row."""
    try:
        return next(csv.reader([value]), [])
    except csv.Error:  # it has several lines
        return [value]


def _problem(path: Path, *, is_directory: bool) -> str | None:
    """Return a clause that says why a file or directory cannot be read, or None."""
    try:
        if is_directory:
            return None if path.is_dir() else "is not a directory"
        stat_regular(path)
    except NotRegular as error:
        return error.strerror
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if os.access(path, os.R_OK) else "may not be read by this user"


SCALED: Final = "lora-scaled"
LORAS_MAX: Final = 64
_OPTIONS: Final = frozenset({"lora", SCALED, "lora-init-without-apply"})
# The engine separates paths and scales by these. Source: common/arg.cpp, --lora-scaled.
_SEPARATORS: Final = frozenset(':,"')


def _adapter_path(path: Path) -> Path:
    if found := sorted(_SEPARATORS.intersection(str(path))):
        raise ValueError(f"llama-server takes no adapter with {found[0]} in its path")
    return path


AdapterPath = Annotated[ExpandedPath, AfterValidator(_adapter_path)]


class LoraSettings(SettingsTable):
    """An adapter with a scale."""

    path: AdapterPath
    """the GGUF file of the adapter"""
    scale: float = Field(1.0, ge=-100, le=100)
    """share of the adapter that MODEL+NAME applies"""


LoraSetting = AdapterPath | LoraSettings


def loras_of(table: Mapping[str, LoraSetting]) -> dict[str, LoraSettings]:
    """Return the adapters by name; the position of one is its id for the engine."""
    return {
        name: LoraSettings.model_construct(path=adapter) if isinstance(adapter, Path) else adapter
        for name, adapter in table.items()
    }


def conflict(flags: Mapping[str, object], args: Sequence[str]) -> str | None:
    """Return the first option that loads unnamed adapters, or None."""
    words = (word.partition("=")[0] for word in args if word.startswith("--"))
    given = (name.lstrip("-") for name in (*flags, *words))
    return next((name for name in given if name in _OPTIONS), None)


def lora_settings(loras: Mapping[str, LoraSettings]) -> dict[str, Setting]:
    """Return the options that load adapters; they override all other settings."""
    if not loras:
        return {}
    listed = ",".join(f"{lora.path}:0" for lora in loras.values())
    reason = "requests choose: " + ", ".join(loras)
    unsafe = "the engine would answer with the cached prompt of another adapter"
    return {
        SCALED: Setting(listed, CORRAL, reason),
        "lora-init-without-apply": Setting(value=True, origin=CORRAL, reason=reason),
        "cache-ram": Setting(0, CORRAL, unsafe),
    }


def check(name: str, found: Gguf, model: Gguf) -> None:
    """Check that a file is an adapter of a model.

    Raises SettingsInvalid: it is not, or has another architecture, or the model generates no text.
    """
    if found.kind != "adapter":
        problem = f"{found.path} is no LoRA adapter but a {found.kind}"
    elif found.architecture != model.architecture:
        problem = f"{found.path} is for {found.architecture}, the model is {model.architecture}"
    elif not model.is_causal or model.pooling is not None:
        problem = "adapters are for models that generate text"
    else:
        return
    raise SettingsInvalid(
        f"loras.{name}: {problem}", hint="convert_lora_to_gguf.py of llama.cpp makes adapters"
    )
