"""What a setting may be, beyond a plain number or text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")
_VARIANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|TiB)")
_UNITS: Final = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,127}")


def _checked(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"not {what}: letters, digits and . _ : @ + - only")
        return name

    return AfterValidator(check)


def _address(listen: str) -> str:
    host, separator, port = listen.rpartition(":")
    if not (host and separator and port.isdecimal() and int(port) <= 65535):
        raise ValueError("not HOST:PORT")
    return listen


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


ExpandedPath = Annotated[Path, AfterValidator(Path.expanduser)]
ModelName = Annotated[str, _checked(_MODEL_NAME, "a model name")]
Alias = Annotated[str, _checked(_ALIAS, "an alias")]
VariantName = Annotated[str, _checked(_VARIANT, "a variant's name")]
NodeName = Annotated[str, _checked(_VARIANT, "a node's name")]
FlagSetting = bool | int | float | str
Address = Annotated[str, AfterValidator(_address)]
NodeAddress = Annotated[str, AfterValidator(_address_of_node)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
