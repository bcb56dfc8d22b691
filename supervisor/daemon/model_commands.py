"""Common parts of commands to a running daemon: names of its models, and the wait for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from supervisor.daemon.control_client import Answer, Client, Stream
from supervisor.daemon.control_messages import DaemonStatus
from supervisor.errors import CorralError, Interrupted, NoSuchModel, did_you_mean
from supervisor.output import ProgressMeter
from supervisor.settings.tables import CATCH_ALL
from supervisor.system.paths import directories


def resolve_running(words: Sequence[str], status: DaemonStatus) -> tuple[str, ...]:
    """Return the names of the models that the words refer to; raises NoSuchModel."""
    if unknown := unknown_words(words, status):
        names = [model.name for model in status.models]
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
    models = status.models
    by_path = {model.path: model.name for model in models}
    by_alias = {
        alias: model.name for model in models for alias in model.aliases if alias != CATCH_ALL
    }
    return {**by_path, **by_alias, **{model.name: model.name for model in models}}


def _key(word: str, names_by_word: Mapping[str, str]) -> str:
    keys = (word, f"{word}:latest", str(Path(word).absolute()))
    return next((key for key in keys if key in names_by_word), word)


def running_status() -> DaemonStatus | None:
    """Return the daemon's status; None if no daemon answers."""
    with suppress(CorralError):
        return Client(directories().control_socket).status()
    return None


def follow(messages: Stream[Answer]) -> Answer:
    """Show load progress until a command is over, and return its answer."""
    try:
        with ProgressMeter() as meter:
            while True:
                if progress := next(messages).get("progress"):
                    meter.show(f"loading {progress['instance']}", progress["fraction"])
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            "stopped waiting; the daemon continues",
            hint="corral status shows how far it is, corral stop stops it",
        ) from interrupt
