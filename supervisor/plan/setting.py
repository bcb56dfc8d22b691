"""Defines a setting with its origin and reason, and tables of llama-server's option names.

Profiles and `corral.toml` use today's long names. The tables translate a setting for a build that
has an older name, and a user's old name to today's. RESERVED lists options that users may not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from proxy.common.toml_text import table_beside
from proxy.common.toml_types import number
from supervisor.builds.help import FlagValue

CORRAL: Final = "llama-corral"
BATCHING: Final = "batching"
# Control characters except tab, line feed and carriage return, which a template may contain.
_CONTROL_IN_LINES: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def argument(text: str) -> str:
    """Check a word of a command line; raises ValueError for control characters."""
    if _CONTROL_IN_LINES.search(text):
        raise ValueError("it has a control character")
    return text


def flag_name(name: str) -> str:
    """Check the name of a flag; raises ValueError if no build could have it."""
    if not re.fullmatch(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError("not an option of llama-server")
    return name


def flag_value(value: FlagValue) -> FlagValue:
    """Check a value; raises ValueError if infinite, over 64 bits or with control characters."""
    return argument(value) if isinstance(value, str) else number(value)


Argument = Annotated[str, AfterValidator(argument)]
FlagName = Annotated[str, AfterValidator(flag_name)]
FlagSetting = Annotated[FlagValue, AfterValidator(flag_value)]


@dataclass(frozen=True, slots=True)
class Setting:
    value: FlagValue
    # `model NAME`, `batching`, `profile NAME`, `machine`, `demand`, `gguf` or `llama-corral`
    origin: str
    reason: str = ""  # a clause; empty if the origin says it all
    is_derived: bool = False  # whether it was `auto`
    is_adapted: bool = False  # whether the daemon changed it while it serves

    @property
    def is_from_user(self) -> bool:
        """Whether its value follows from the model's own table alone."""
        return self.origin == BATCHING or self.origin.startswith("model ")

    @property
    def is_own(self) -> bool:
        """Whether the model's own table gives its value."""
        is_given = self.origin == BATCHING and not self.is_derived
        return is_given or self.origin.startswith("model ")


SettingsByFlag = Mapping[str, Setting]


def values(settings: SettingsByFlag) -> dict[str, FlagValue]:
    return {key: setting.value for key, setting in settings.items()}


# The tables of `setting.toml`.
OptionValue = tuple[str, FlagValue]
_TABLES: Final[Any] = table_beside(__file__)
SPELLINGS: Final[Mapping[str, Sequence[str]]] = _TABLES["spellings"]
DEFAULTS: Final[Mapping[str, tuple[FlagValue, str]]] = _TABLES["defaults"]
ONCE_BARE: Final = frozenset[str](_TABLES["once_bare"])
ENGINE_TOOLS: Final = frozenset[str](_TABLES["engine_tools"])
MOVED, MOVED_BACK = (
    {(old, value): (new, new_value) for old, value, new, new_value in _TABLES[name]}
    for name in ("moved", "moved_back")
)
OLDER_WORDS, IMPLIED = (
    {(key, value): other for key, value, other in _TABLES[name]}
    for name in ("older_words", "implied")
)
_TOOLS: Final = "an engine runs tools and opens other servers only with engine_tools = true"
RESERVED: Final[Mapping[str, str]] = dict.fromkeys(sorted(ENGINE_TOOLS), _TOOLS) | {
    key: reason for reason, keys in _TABLES["reserved"].items() for key in keys
}

# Presets such as --gpt-oss-20b-default, which replace our model by one from the network.
_PRESETS: Final = ("embd-", "fim-", "gpt-oss-", "vision-", "tts-oute")


def reserved_reason(key: str, *, runs_tools: bool = False) -> str | None:
    """Return why users may not set an option, or None; `runs_tools`: as the model's setting."""
    if runs_tools and key in ENGINE_TOOLS:
        return None
    if key.startswith(_PRESETS) and key.endswith(("-default", "-spec")):
        return RESERVED["model"]
    return RESERVED.get(key)
