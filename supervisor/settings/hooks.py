"""`[hooks]`: commands that the daemon runs when something happens."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from proxy.config.types import SettingsTable, Text

HookName = Literal[
    "model_loaded",
    "model_unloaded",
    "model_failed",
    "model_idle",
    "daemon_idle",
    "node_down",
    "node_up",
]

# Time that commands have left when the daemon stops, after its engines.
STOP_LIMIT_S: Final = 5.0
_COMMANDS_MAX: Final = 8
_WORDS_MAX: Final = 64
_WORD_MAX: Final = 4096
_SECONDS_MAX: Final = 31_536_000


def _commands(value: object) -> object:
    """Take one command, a list of words, for a list of one command."""
    if isinstance(value, str):
        raise ValueError(  # noqa: TRY004 (pydantic explains a ValueError)
            'not a list of words, as ["notify-send", "loaded"]; no shell reads it'
        )
    is_one = isinstance(value, list | tuple) and value and isinstance(value[0], str)
    return [value] if is_one else value


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words or not words[0]:
        raise ValueError("no program: the first word names it")
    return words


Words = Annotated[
    tuple[Annotated[Text, Field(max_length=_WORD_MAX)], ...],
    Field(max_length=_WORDS_MAX),
    BeforeValidator(lambda words: _command(tuple(words)) if isinstance(words, list) else words),
]
Commands = Annotated[
    tuple[Words, ...],
    Field(max_length=_COMMANDS_MAX),
    BeforeValidator(_commands, json_schema_input_type=list[str] | list[list[str]]),
]


class HookSettings(SettingsTable):
    """`[hooks]`: each a command as a list of words, or a list of commands."""

    model_loaded: Commands = Field((), description="a model began to serve")
    model_unloaded: Commands = Field((), description="the last process of a model has stopped")
    model_failed: Commands = Field((), description="a process of a model crashed or did not start")
    model_idle: Commands = Field((), description="a loaded model had no request for model_idle_s")
    daemon_idle: Commands = Field((), description="no model had a request for daemon_idle_s")
    node_down: Commands = Field((), description="another machine does not answer, or stops")
    node_up: Commands = Field((), description="it answers again")
    timeout_s: float = Field(
        30, gt=0, le=3600, description="time for one command, after which it is killed"
    )
    model_idle_s: float = Field(
        600, ge=1, le=_SECONDS_MAX, description="time without a request for model_idle"
    )
    daemon_idle_s: float = Field(
        600, ge=1, le=_SECONDS_MAX, description="time without a request for daemon_idle"
    )

    def commands(self, hook: HookName) -> tuple[tuple[str, ...], ...]:
        found: tuple[tuple[str, ...], ...] = getattr(self, hook)
        return found
