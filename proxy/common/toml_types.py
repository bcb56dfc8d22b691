"""Types of settings: tables with known keys only, text, paths, numbers, durations and addresses."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from proxy.common.path_length import too_long

# Control characters can control a terminal, and NUL ends a string for the system.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INTEGER_MAX: Final = 2**63 - 1
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


class SettingsTable(BaseModel):
    """A table of `corral.toml`; an unknown key is an error.

    Its validator is built at its first use alone, because most tables are validated as parts of
    others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def text(value: str) -> str:
    """Check that a text has no control characters.

    Raises ValueError: it has a control character.
    """
    if _CONTROL.search(value):
        raise ValueError("it has a control character")
    return value


def number(value: float) -> float:
    """Check that a number can be written as JSON.

    Raises ValueError: it is infinite, not a number, or an integer of more than 64 bits.
    """
    if isinstance(value, int):
        if abs(value) > _INTEGER_MAX:
            raise ValueError("a number of more than 64 bits")
    elif not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def duration_s(text: str) -> float | None:
    """Parse a duration such as `15m` or `1h30m`, or a number of seconds; None if it is neither.

    Source: Go, package time, ParseDuration.
    """
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


def _path(path: Path) -> Path:
    text(str(path))
    if too_long(path):
        raise ValueError("longer than a path may be")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"no such home directory: {path.parts[0]}") from error


def _not_empty(value: object) -> object:
    if value == "":  # it would be the directory of the settings file
        raise ValueError("is empty; leave it out instead")
    return value


Text = Annotated[str, AfterValidator(text)]
ExpandedPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_path)]


def _address(listen: str) -> str:
    host, separator, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len("65535")
    if not (host and separator and is_number and int(port) <= 65535):
        raise ValueError("not HOST:PORT")
    if any(char.isspace() for char in text(host)):
        raise ValueError("not HOST:PORT: a space in the host")
    host.strip("[]").encode("idna")  # as the system does; raises ValueError if it is invalid
    return listen


Address = Annotated[str, AfterValidator(_address)]


def host_of(address: str) -> str:
    """Return the host of HOST:PORT, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listening address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
