"""Reads a TOML file that a person wrote: settings, or a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from proxy.toml_text import parse_toml
from supervisor.errors import SettingsInvalid
from supervisor.host.files import open_regular

_FILE_MAX_BYTES: Final = 1024**2


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a file says.

    Raises:
        SettingsInvalid: It cannot be read, is no regular file, larger than 1 MiB, not TOML, or
            nested too deep.
    """
    content = _read(path)
    try:
        return parse_toml(content)
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not text in UTF-8: {error}") from error
    except ValueError as error:
        raise SettingsInvalid(
            f"{path} is not TOML: {error}", hint="see toml.io for the rules"
        ) from error


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsInvalid(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _FILE_MAX_BYTES:
        raise SettingsInvalid(f"{path} is larger than {_FILE_MAX_BYTES >> 20} MiB")
    return content
