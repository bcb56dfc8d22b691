"""One setting of a model: its value, who set it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.engines.help import FlagValue

CORRAL: Final = "llama-corral"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, who set it, and why where that is not plain.

    Attributes:
        value: What was set or derived.
        origin: `model NAME`, `profile NAME`, `machine`, `gguf` or `llama-corral`.
        reason: A clause; empty where the origin says it all.
    """

    value: FlagValue
    origin: str
    reason: str = ""

    @property
    def is_own(self) -> bool:
        """Return whether the model's own table sets it."""
        return self.origin.startswith("model ")


Settings = Mapping[str, Setting]
