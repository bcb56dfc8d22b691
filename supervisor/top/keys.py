"""Which keys the bytes of a terminal stand for. Pure."""

from __future__ import annotations

import re
from typing import Final

# Source: ECMA-48 5.4, control sequences; SS3 in xterm's application mode (ctlseqs, "PC-Style").
_KEY: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|[\x00-\xff]")
_UNFINISHED: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_UNFINISHED_MAX_BYTES: Final = 32
_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
}


def decode(data: bytes) -> tuple[list[str], bytes]:
    """Return the keys, and bytes that may begin another; keys without a name are left out.

    A lone escape is such a beginning: `flush` tells that nothing follows it.
    """
    found = _UNFINISHED.search(data[-_UNFINISHED_MAX_BYTES:])
    rest = found[0] if found else b""
    return flush(data[: len(data) - len(rest)]), rest


def flush(data: bytes) -> list[str]:
    names = (_name(found[0]) for found in _KEY.finditer(data))
    return [name for name in names if name]


def _name(key: bytes) -> str:
    if key in _NAMES:
        return _NAMES[key]
    return key.decode("ascii") if len(key) == 1 and b" " <= key <= b"~" else ""
