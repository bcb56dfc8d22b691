"""Parses commands to a running daemon: names of models, and requests for a canary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from supervisor.builds.installed import EngineSetting, is_build_name
from supervisor.daemon.control_messages import DaemonStatus, StreamMessage, daemon_exited_error
from supervisor.errors import Interrupted, NoSuchModel, SettingsInvalid, did_you_mean
from supervisor.experiments.canaries import Canary
from supervisor.output import ProgressMeter
from supervisor.settings.tables import CATCH_ALL


def resolve_running(words: Sequence[str], status: DaemonStatus) -> tuple[str, ...]:
    """Return the names of the models that the words refer to; raises NoSuchModel."""
    if unknown := unknown_words(words, status):
        names = [model["name"] for model in status["models"]]
        raise NoSuchModel(
            f"the running daemon has no model {unknown[0]!r}" + did_you_mean(unknown[0], names),
            hint=f"available: {', '.join(names) or 'none'}; corral start FILE.gguf adds a model",
        )
    names_by_word = _names_by_word(status)
    return tuple(names_by_word[_key(word, names_by_word)] for word in words)


def unknown_words(words: Sequence[str], status: DaemonStatus) -> list[str]:
    """Return the words that refer to no model of a running daemon."""
    names_by_word = _names_by_word(status)
    return [word for word in words if _key(word, names_by_word) not in names_by_word]


def _names_by_word(status: DaemonStatus) -> dict[str, str]:
    """Map each way to refer to a model (name, alias, path of its file) to its name."""
    models = status["models"]
    by_path = {model["path"]: model["name"] for model in models}
    by_alias = {
        alias: model["name"] for model in models for alias in model["aliases"] if alias != CATCH_ALL
    }
    return {**by_path, **by_alias, **{model["name"]: model["name"] for model in models}}


def _key(word: str, names_by_word: Mapping[str, str]) -> str:
    keys = (word, f"{word}:latest", str(Path(word).absolute()))
    return next((key for key in keys if key in names_by_word), word)


def last_message(messages: Iterable[StreamMessage]) -> StreamMessage:
    """Show load progress, and return the message with the result."""
    try:
        with ProgressMeter() as meter:
            for message in messages:
                if progress := message.get("progress"):
                    meter.show(f"loading {progress['instance']}", progress["fraction"])
                elif "event" not in message and "waiting" not in message:
                    return message
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            "stopped waiting; the daemon continues",
            hint="corral status shows how far it is, corral stop stops it",
        ) from interrupt
    raise daemon_exited_error()


LIMIT_MAX_S: Final = 31 * 86_400
MARGIN_MAX: Final = 1.0


class _CanaryBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    engine: str = Field(min_length=1)
    share: float = Field(gt=0, lt=1)
    limit_s: float | None = Field(gt=0, le=LIMIT_MAX_S)
    margin: float = Field(ge=0, le=MARGIN_MAX)


def engine_setting(text: str) -> EngineSetting:
    """Return the name of an installed build, or a path."""
    return text if is_build_name(text) else Path(text)


def canary_request(model: str, body: bytes) -> Canary:
    """Parse a body; raises SettingsInvalid."""
    try:
        found = _CanaryBody.model_validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid(
            'the body must be {"engine": PATH, "share": 0 to 1, "limit_s": seconds or null, '
            '"margin": 0 to 1}'
        ) from error
    return Canary(model, engine_setting(found.engine), found.share, found.limit_s, found.margin)
