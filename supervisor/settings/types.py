"""What a setting may be, beyond a plain number or text."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from supervisor.host.files import too_long

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")
_VARIANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?(KiB|MiB|GiB|TiB)")
_UNITS: Final = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
# What no name, path or address has: characters that command terminals, and NUL, which ends a text
# for the system.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A template given as a flag has lines.
_CONTROL_IN_LINES: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_FLAG: Final = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_INTEGER_MAX: Final = 2**63 - 1
FlagValue = str | int | float | bool
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,127}")


def _checked(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"not {what}: letters, digits and . _ : @ + - only")
        return name

    return AfterValidator(check)


def _address(listen: str) -> str:
    host, separator, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len("65535")
    if not (host and separator and is_number and int(port) <= 65535):
        raise ValueError("not HOST:PORT")
    if any(one.isspace() for one in _text(host)):
        raise ValueError("not HOST:PORT: a space in the host")
    host.strip("[]").encode("idna")  # as the system does; raises ValueError where it cannot
    return listen


def _text(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError("it has a control character in it")
    return text


def _text_of_lines(text: str) -> str:
    if _CONTROL_IN_LINES.search(text):
        raise ValueError("it has a control character in it")
    return text


def _path(path: Path) -> Path:
    _text(str(path))
    if too_long(path):
        raise ValueError("longer than a path may be")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"no such home directory: {path.parts[0]}") from error


def flag_name(name: str) -> str:
    """Return the name of a flag as it is.

    Raises:
        ValueError: No option of any build is called so.
    """
    if not _FLAG.fullmatch(name):
        raise ValueError("not the name of an option of llama-server")
    return name


def flag_value(value: FlagValue) -> FlagValue:
    """Return the value of a flag as it is.

    Raises:
        ValueError: It is no finite number, too large for 64 bits, or has control characters.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    if isinstance(value, int) and abs(value) > _INTEGER_MAX:
        raise ValueError("a number of more than 64 bits")
    return _text_of_lines(value) if isinstance(value, str) else value


def json_value(value: Any) -> Any:
    """Return what a request may hold as it is.

    Raises:
        ValueError: JSON cannot say it: a date, a number that is not finite or of over 64 bits.
    """
    if isinstance(value, dict):
        for inner in value.values():
            json_value(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            json_value(inner)
    elif isinstance(value, bool | int | float):
        flag_value(value)
    elif not (value is None or isinstance(value, str)):
        raise ValueError(f"a {type(value).__name__} cannot be said in JSON")
    return value


def _bytes(amount: object) -> object:
    """Return bytes for a text such as `12 GiB`; anything else as it is."""
    found = _SIZE.fullmatch(amount) if isinstance(amount, str) else None
    return int(float(found[1]) * 1024 ** _UNITS[found[2]]) if found else amount


def _address_of_node(url: str) -> str:
    """Return where a node's pages are, without the `/v1` that clients want behind it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment or not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # to read it refuses whatever else is no port
        raise ValueError("not a port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


ExpandedPath = Annotated[Path, AfterValidator(_path)]
Text = Annotated[str, AfterValidator(_text)]
Argument = Annotated[str, AfterValidator(_text_of_lines)]
JsonValue = Annotated[Any, AfterValidator(json_value)]
ModelName = Annotated[str, _checked(_MODEL_NAME, "a model name")]
Alias = Annotated[str, _checked(_ALIAS, "an alias")]
VariantName = Annotated[str, _checked(_VARIANT, "a variant's name")]
NodeName = Annotated[str, _checked(_VARIANT, "a node's name")]
FlagName = Annotated[str, AfterValidator(flag_name)]
FlagSetting = Annotated[FlagValue, AfterValidator(flag_value)]
Address = Annotated[str, AfterValidator(_address)]
NodeAddress = Annotated[str, AfterValidator(_address_of_node)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
