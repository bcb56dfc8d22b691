"""Times and sizes on the command line."""

from __future__ import annotations

from typing import Final

import typer

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES: Final = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_UNIT_CHARACTERS: Final = 3


def read_seconds(text: str) -> float:
    """Read a time such as `10m`, `90s` or `2h`; raises BadParameter."""
    unit = _SECONDS.get(text[-1:])
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no time; write 90s, 10m or 2h") from error


def read_bytes(text: str) -> int:
    """Read a size such as `64MiB`, `64 MiB` or a number of bytes; raises BadParameter."""
    unit = _BYTES.get(text[-_UNIT_CHARACTERS:])
    try:
        return int(float(text[:-_UNIT_CHARACTERS]) * unit) if unit else int(text)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text} is no size; write 64MiB or 1GiB") from error


def read_flag(text: str) -> tuple[str, bool | int | float | str]:
    """Read a flag such as `threads=4`; raises BadParameter."""
    key, is_given, value = text.partition("=")
    if not (key and is_given):
        raise typer.BadParameter(f"{text} is no setting; write KEY=VALUE")
    return key.strip().lstrip("-"), _flag_value(value.strip())


def _flag_value(text: str) -> bool | int | float | str:
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
