"""Types of settings that only the supervisor has: names and sizes."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from proxy.config.types import ExpandedPath
from proxy.keep_alive import duration_s
from supervisor.model_stores import references

# `ORGANISATION/MODEL:QUANTISATION` too, as hubs and llama-server's router mode write it.
_MODEL_NAME: Final = re.compile(
    r"(?=.{1,128}\Z)[A-Za-z0-9][A-Za-z0-9._:@+-]*(?:/[A-Za-z0-9_][A-Za-z0-9._:@+-]*){0,7}"
)
# Means every name that no model has.
CATCH_ALL: Final = "*"
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,127}|\*")
_SHORT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?(KiB|MiB|GiB|TiB)")
_UNITS: Final = {"KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


def _matching(pattern: re.Pattern[str], what: str, *, has_slashes: bool = False) -> AfterValidator:
    slash = " /" if has_slashes else ""

    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"not {what}: letters, digits and . _ : @ + -{slash} only")
        return name

    return AfterValidator(check)


def is_model_name(name: str) -> bool:
    """Whether `[models.NAME]` may have this name."""
    return _MODEL_NAME.fullmatch(name) is not None


def is_alias(name: str) -> bool:
    """Whether `aliases` may have this name."""
    return _ALIAS.fullmatch(name) is not None


def _bytes(amount: object) -> object:
    if not isinstance(amount, str) or amount.isdecimal():
        return amount
    if found := _SIZE.fullmatch(amount):
        return int(float(found[1]) * 1024 ** _UNITS[found[2]])
    raise ValueError("not a number of bytes, nor a size such as 12 GiB")


def _seconds(duration: object) -> object:
    if not isinstance(duration, str):
        return duration
    if (seconds := duration_s(duration)) is None:
        raise ValueError('neither seconds nor a duration such as "15m" or "1h30m"')
    return seconds


ModelName = Annotated[str, _matching(_MODEL_NAME, "a model name", has_slashes=True)]
Alias = Annotated[str, _matching(_ALIAS, "an alias", has_slashes=True)]
VariantName = Annotated[str, _matching(_SHORT_NAME, "a variant's name")]
NodeName = Annotated[str, _matching(_SHORT_NAME, "a node's name")]
WorkerName = Annotated[str, _matching(_SHORT_NAME, "a worker's name")]
# A reference such as `hf:OWNER/NAME:QUANT` is one too.
ModelPath = Annotated[ExpandedPath, AfterValidator(references.check)]
Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=int | str)]
# Seconds, or a duration such as `15m`.
Seconds = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str)]
