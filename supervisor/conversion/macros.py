"""Macros of llama-swap: `${NAME}` in texts, lists and tables.

Source: llama-swap, internal/config/macros.go: `${env.X}` is replaced first; then each macro in
turn, the last declared first, so that a macro may use those before it, and those of a model count
in the macros of all models too. `${PORT}` and `${PID}` are known when a model starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from supervisor.errors import SettingsInvalid

_ENVIRONMENT: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT_MAX: Final = 65_536


def from_environment(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${env.X}`; unknown ones stay."""
    return _ENVIRONMENT.sub(lambda found: environ.get(found[1], found[0]), text)


def expanded(value: Any, macros: Mapping[str, object]) -> Any:
    """Replace macros, the last first; unknown ones stay. Raises SettingsInvalid."""
    if isinstance(value, str):
        return _text(value, macros)
    if isinstance(value, list):
        return [expanded(one, macros) for one in value]
    if isinstance(value, Mapping):
        return {expanded(key, macros): expanded(one, macros) for key, one in value.items()}
    return value


def _text(text: str, macros: Mapping[str, object]) -> str:
    for name in reversed(tuple(macros)):
        text = text.replace(f"${{{name}}}", str(macros[name]))
        if len(text) > _TEXT_MAX:
            raise SettingsInvalid(
                f"the macro {name} makes a text longer than {_TEXT_MAX} characters"
            )
    return text
