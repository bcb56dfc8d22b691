"""Reads TOML files that people write (settings, profiles), and quotes their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from proxy.config.toml_text import parse_toml
from supervisor.errors import SettingsInvalid
from supervisor.host.files import open_regular

_FILE_MAX_BYTES: Final = 1024**2
QUOTED_MAX: Final = 120


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a file.

    Raises:
        SettingsInvalid: It cannot be read, is not a regular file, is larger than 1 MiB, not TOML,
            or nested too deep.
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


def brief(value: object, *, quoted: bool = True) -> str:
    """Return a value for a message, cut at 120 characters."""
    try:
        text = repr(value) if quoted else str(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= QUOTED_MAX else f"{text[:QUOTED_MAX]}…"
