"""Parses TOML with bounded depth and time.

Python's parser recurses for each level of nesting, and is quadratic in the parts of a dotted key: a
file of a megabyte could crash the daemon or block it for hours.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Nested tables and lists; a JSON schema in a variant may need a dozen.
DEPTH_MAX: Final = 64
# Strings (multi-line first) and comments contain no keys. Possessive, so that time is linear.
_NO_KEYS: Final = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?'
    r"|'''(?:[^']|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_BETWEEN_KEYS: Final = re.compile(r"[=,\[\]{}\n]")


def table_beside(module_file: str) -> dict[str, Any]:
    """Return the table of the file that has a module's name and ends with .toml."""
    return tomllib.loads(Path(module_file).with_suffix(".toml").read_text("utf-8"))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse TOML; raise ValueError if it is invalid, not UTF-8, or deeper than DEPTH_MAX levels."""
    text = content.decode("utf-8")
    pieces = _BETWEEN_KEYS.split(_NO_KEYS.sub("", text))
    # The parts of the longest dotted key, or slightly more.
    if 1 + max(piece.count(".") for piece in pieces) > DEPTH_MAX:
        raise ValueError(f"a key has more than {DEPTH_MAX} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise _depth_error() from error
    if is_deeper(table, DEPTH_MAX):
        raise _depth_error()
    return table


def is_deeper(value: object, most: int) -> bool:
    """Return whether nested tables and lists have more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for outer in level for inner in _inner_values(outer)]
        if not level:
            return False
    return True


def _inner_values(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _depth_error() -> ValueError:
    return ValueError(f"it is nested deeper than {DEPTH_MAX} levels")
