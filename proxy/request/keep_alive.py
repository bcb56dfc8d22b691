"""The member `keep_alive`: how long a model stays loaded after a request. Pure.

A number is seconds; a string is a duration in Go's format (`5m`, `1h30m`, `1.5h`) or a number of
seconds. 0 unloads the model after the answer; a negative value keeps it loaded for ever.

Source: Ollama, api/types.go (Duration); its clients also send numbers as strings. Go, package time,
ParseDuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import BadRequest

MEMBER: Final = "keep_alive"
_UNITS_S: Final[Mapping[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_NUMBER: Final = r"\d{1,16}(?:\.\d{0,16})?|\.\d{1,16}"
_PART: Final = re.compile(rf"({_NUMBER})({'|'.join(_UNITS_S)})", re.ASCII)
_DURATION: Final = re.compile(
    rf"([+-]?)(?:({_NUMBER})|((?:(?:{_NUMBER})(?:{'|'.join(_UNITS_S)}))+))", re.ASCII
)
_TEXT_MAX_CHARACTERS: Final = 64


def keep_alive_s(members: Mapping[str, Any]) -> float | None:
    """Return the seconds, infinite for ever; None if the request has no `keep_alive`.

    Raises:
        BadRequest: The value is neither a number nor a duration.
    """
    match members.get(MEMBER):
        case None:
            return None
        case bool():
            raise _keep_alive_error()
        case int() | float() as seconds:
            return math.inf if seconds < 0 else float(seconds)
        case str() as text if (duration := duration_s(text)) is not None:
            return math.inf if duration < 0 else duration
        case _:
            raise _keep_alive_error()


def duration_s(text: str) -> float | None:
    """Parse a duration such as `15m`, or a number of seconds; None if it is neither."""
    found = _DURATION.fullmatch(text.strip()) if len(text) <= _TEXT_MAX_CHARACTERS else None
    if found is None:
        return None
    sign, bare, parts = found.groups()
    seconds = (
        float(bare)
        if bare
        else sum((float(part[1]) * _UNITS_S[part[2]]) for part in _PART.finditer(parts))
    )
    return -seconds if sign == "-" else seconds


def _keep_alive_error() -> BadRequest:
    return BadRequest(
        f"the member {MEMBER} must be seconds as a number, or a duration such as "
        '"5m" or "1h30m"; 0 unloads the model after the answer, -1 keeps it loaded'
    )
