"""Reads TOML files that people write (settings, profiles), and quotes their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from proxy.common.toml_text import parse_toml
from supervisor.errors import SettingsInvalid
from supervisor.system.files import open_regular

FILE_MAX_BYTES: Final = 1024**2
QUOTED_MAX: Final = 120
_STATEMENT_MAX_LINES: Final = 200


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a file.

    Raises SettingsInvalid: the file cannot be read, is not a regular file, is larger than 1 MiB, is
    not TOML, or is nested too deep.
    """
    return parse_content(read_limited(path), path)


def parse_content(content: bytes, path: Path) -> dict[str, Any]:
    """Parse the content of a file; raises SettingsInvalid: it is not TOML, or nested too deep."""
    try:
        return parse_toml(content)
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not text in UTF-8: {error}") from error
    except ValueError as error:
        raise SettingsInvalid(
            f"{path} is not TOML: {error}", hint="see toml.io for the rules"
        ) from error


def line_of(content: bytes, key: Sequence[str]) -> int | None:
    """Return the number, from 1, of the line that sets a key or opens the table that lacks it.

    None if no line does, or if the content is larger than 64 KiB. The first N lines of TOML are
    valid TOML if a statement ends there, so the search parses prefixes.
    """
    if len(content) > 64 * 1024:  # it is parsed some ten times
        return None
    lines = content.split(b"\n")
    return next((line for end in range(len(key), 0, -1) if (line := _line(lines, key[:end]))), None)


def _line(lines: Sequence[bytes], key: Sequence[str]) -> int | None:
    """Find the line of the first statement that sets a key, by bisection."""
    before, after = 0, len(lines)
    if not _sets(lines, key):
        return None
    while after - before > 1:
        middle = (before + after) // 2
        ends = range(middle, min(after, middle + _STATEMENT_MAX_LINES))
        sets = ((end, _sets(lines[:end], key)) for end in ends)
        whole = next((end for end, is_set in sets if is_set is not None), None)
        if whole is None or _sets(lines[:whole], key):
            after = middle
        else:
            before = whole
    return before + 1


def _sets(lines: Sequence[bytes], key: Sequence[str]) -> bool | None:
    """Return whether lines set a key; None if they end within a statement."""
    try:
        return has_key(parse_toml(b"\n".join(lines)), key)
    except ValueError:
        return None


def has_key(table: object, key: Sequence[str]) -> bool:
    """Return whether nested tables have a key."""
    for part in key:
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def read_limited(path: Path) -> bytes:
    """Read a file. Raises SettingsInvalid: it cannot be read, or is larger than 1 MiB."""
    try:
        with open_regular(path) as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsInvalid(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_MAX_BYTES:
        raise SettingsInvalid(f"{path} is larger than {FILE_MAX_BYTES >> 20} MiB")
    return content


def brief(value: object, *, quoted: bool = True) -> str:
    """Return a value for a message, cut at 120 characters."""
    try:
        text = repr(value) if quoted else str(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= QUOTED_MAX else f"{text[:QUOTED_MAX]}…"
