"""Files that a model's flags name.

Which options take files is read from the recorded help texts: `--lora FNAME`. An engine looks for a
relative path in its working directory, which is not the user's.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from supervisor.engines.help import Flag, FlagValue, recorded_flag
from supervisor.errors import SettingsInvalid
from supervisor.host.files import NotRegular, expanded, stat_regular

_SCALED: Final = "FNAME:SCALE"
_MANY: Final = "comma-separated"
# Engines create these.
_CREATED: Final = frozenset({"lookup-cache-dynamic", "log-prompts-dir"})


def absolute(flags: Mapping[str, FlagValue], base: Path) -> dict[str, FlagValue]:
    """Flags with `~` expanded in paths, and relative ones joined to a directory."""
    return with_paths(flags, lambda path: base / expanded(path))


def with_paths(
    flags: Mapping[str, FlagValue], change: Callable[[Path], Path]
) -> dict[str, FlagValue]:
    """Flags with every path changed."""
    return {
        name: _mapped(value, flag, change)
        if isinstance(value, str) and (flag := _file_flag(name))
        else value
        for name, value in flags.items()
    }


def check_files(model: str, flags: Mapping[str, FlagValue], own: Mapping[str, FlagValue]) -> None:
    """Look at the files that the flags of a model name; those not in `own` are its trial's.

    Raises:
        SettingsInvalid: An engine could not read one.
    """
    for name, path, reason in _unreadable(flags):
        table = "flags" if own.get(name) == flags[name] else "trial.flags"
        raise SettingsInvalid(
            f"models.{model}.{table}.{name}: {path} {reason}",
            hint="correct the path; a relative one starts at the directory of the settings file",
        )


def _unreadable(flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, Path, str]]:
    for name, value in flags.items():
        flag = _file_flag(name) if isinstance(value, str) else None
        if flag is None or flag.key in _CREATED:
            continue
        for path in _paths(str(value), flag):
            if reason := _problem(path, is_directory=flag.key.endswith(("-dir", "-path"))):
                yield name, path, reason


def _file_flag(name: str) -> Flag | None:
    flag = recorded_flag(name)
    return flag if flag and (flag.kind == "path" or _is_scaled(flag)) else None


def _is_scaled(flag: Flag) -> bool:
    return flag.hint is not None and flag.hint.startswith(_SCALED)


def _paths(value: str, flag: Flag) -> list[Path]:
    found: list[Path] = []

    def note(path: Path) -> Path:
        found.append(path)
        return path

    _mapped(value, flag, note)
    return found


def _mapped(value: str, flag: Flag, change: Callable[[Path], Path]) -> str:
    """A value with each of its paths changed."""
    if not (_is_scaled(flag) or _MANY in flag.help):
        return str(change(Path(value))) if value else value
    return _joined([_changed(one, flag, change) for one in _split(value)])


def _changed(item: str, flag: Flag, change: Callable[[Path], Path]) -> str:
    path, colon, scale = item.rpartition(":") if _is_scaled(flag) else (item, "", "")
    return f"{change(Path(path))}{colon}{scale}" if path else item


# Source: parse_csv_row of llama.cpp's common/arg.cpp: a path with a comma stands in double quotes.


def _split(value: str) -> list[str]:
    try:
        return next(csv.reader([value]), [])
    except csv.Error:  # it has several lines
        return [value]


def _joined(items: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(items)
    return line.getvalue()


def _problem(path: Path, *, is_directory: bool) -> str | None:
    """Why a file or a directory cannot be read, as a clause; None if it can."""
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
