"""TOML that a person wrote, bounded: whatever it says is a table, or a ValueError in a sentence.

Python's parser recurses for each level of nesting, and needs the square of the parts of a dotted
key; a file of a megabyte could end the daemon by the one and hold it up for hours by the other.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

# Tables and lists within each other; a JSON schema in a variant may need a dozen.
DEPTH_MAX: Final = 64
# Strings, those over many lines first, and comments: what has no keys in it. Possessive, so that
# each character is looked at once.
_NO_KEYS: Final = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?'
    r"|'''(?:[^']|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_BETWEEN_KEYS: Final = re.compile(r"[=,\[\]{}\n]")


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return what a text says.

    Raises:
        ValueError: It is not TOML, not UTF-8, or nested deeper than DEPTH_MAX levels.
    """
    text = content.decode("utf-8")
    if _longest_key(text) > DEPTH_MAX:
        raise ValueError(f"a key has more than {DEPTH_MAX} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    if is_deeper(table, DEPTH_MAX):
        raise _too_deep()
    return table


def is_deeper(value: object, most: int) -> bool:
    """Return whether tables and lists lie within each other more than so many levels deep."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _longest_key(text: str) -> int:
    """Return the parts of the longest dotted key, or a little more."""
    pieces = _BETWEEN_KEYS.split(_NO_KEYS.sub("", text))
    return 1 + max(piece.count(".") for piece in pieces)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {DEPTH_MAX} levels")
