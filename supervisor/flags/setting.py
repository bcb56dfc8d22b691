"""One setting of a model: its value, origin and reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator

from proxy.config.types import number
from supervisor.engines.help import FlagValue

CORRAL: Final = "llama-corral"
BATCHING: Final = "batching"
_FLAG: Final = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Control characters but tab, line feed and carriage return: a template given as a flag has lines.
_CONTROL_IN_LINES: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def argument(text: str) -> str:
    """Check a word of a command line: a ValueError for control characters."""
    if _CONTROL_IN_LINES.search(text):
        raise ValueError("it has a control character")
    return text


def flag_name(name: str) -> str:
    """Check the name of a flag: a ValueError for one that no build could have."""
    if not _FLAG.fullmatch(name):
        raise ValueError("not an option of llama-server")
    return name


def flag_value(value: FlagValue) -> FlagValue:
    """Check a flag's value: a ValueError if not finite, over 64 bits or with control characters."""
    return argument(value) if isinstance(value, str) else number(value)


Argument = Annotated[str, AfterValidator(argument)]
FlagName = Annotated[str, AfterValidator(flag_name)]
FlagSetting = Annotated[FlagValue, AfterValidator(flag_value)]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin."""

    value: FlagValue
    # `model NAME`, `batching`, `profile NAME`, `machine`, `demand`, `gguf` or `llama-corral`
    origin: str
    reason: str = ""  # a clause; empty if the origin says it all
    is_derived: bool = False  # it was `auto`
    is_adapted: bool = False  # the daemon changed it while it serves

    @property
    def is_from_user(self) -> bool:
        """Whether its value follows from the model's own table alone."""
        return self.origin == BATCHING or self.origin.startswith("model ")

    @property
    def is_own(self) -> bool:
        """Whether the model's own table gives its value."""
        is_given = self.origin == BATCHING and not self.is_derived
        return is_given or self.origin.startswith("model ")


Settings = Mapping[str, Setting]


def values(settings: Settings) -> dict[str, FlagValue]:
    return {key: setting.value for key, setting in settings.items()}
