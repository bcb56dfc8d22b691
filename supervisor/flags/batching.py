"""`[models.NAME.batching]`: how an engine batches tokens, as settings of its flags. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from pydantic import Field

from proxy.config.types import SettingsTable
from supervisor.engines.help import FlagValue, newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.flags.auto import AUTO
from supervisor.flags.render import canonical
from supervisor.flags.setting import BATCHING, Setting

# The option that each key sets, by its name in `[models.NAME.flags]`.
OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_ubatch_tokens": "ubatch-size",
        "max_sbatch_sequences": "parallel",
        "max_context_length": "ctx-size",
        "dynamic_batching": "cont-batching",
    }
)


class BatchingSettings(SettingsTable):
    """`[models.NAME.batching]`: continuous batching; what is unset stays as the profile has it."""

    max_ubatch_tokens: int | None = Field(
        None, ge=1, le=65_536, description="tokens of one forward pass at most (--ubatch-size)"
    )
    max_sbatch_sequences: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="sequences of one batch: the slots of an instance (--parallel), which then do "
        "not follow demand",
    )
    max_context_length: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="tokens of context of one sequence; --ctx-size is this for each slot",
    )
    dynamic_batching: bool | None = Field(
        None,
        description="whether a sequence may join while others decode (--cont-batching)",
    )
    prefer_pure_decode: bool = Field(
        default=False,
        description="short pauses of running streams before a short time to the first token: "
        "prompts are computed one at a time and in chunks while others decode",
    )

    def settings(self) -> dict[str, Setting]:
        """Settings by today's name of the option; `auto` where the others decide the number."""
        given = {
            option: Setting(value, BATCHING, key)
            for key, option in OPTIONS.items()
            if (value := getattr(self, key)) is not None
        }
        if self.max_context_length is not None:
            given["ctx-size"] = Setting(AUTO, BATCHING)
        return given

    def conflicts(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Yield each key here, and the flag of the model that sets its option too."""
        keys = {OPTIONS[key]: key for key in OPTIONS if getattr(self, key) is not None}
        for name, value in flags.items() if keys else ():
            try:
                option, _ = canonical(name, value, newest_flags())
            except SettingsInvalid:  # its plan reports it
                continue
            if key := keys.get(option):
                yield key, name
