"""Commands to a running daemon: which of its models the words name, and the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from supervisor.control.messages import DaemonStatus, StreamMessage, daemon_exited
from supervisor.errors import Interrupted, NoSuchModel
from supervisor.output import ProgressMeter


def resolve_running(words: Sequence[str], status: DaemonStatus) -> tuple[str, ...]:
    """Return the models of a running daemon that the words name, by name or by the file's path."""
    by_path = {model["path"]: model["name"] for model in status["models"]}
    names = [model["name"] for model in status["models"]]
    found = [word if word in names else by_path.get(str(Path(word).absolute())) for word in words]
    for word, name in zip(words, found, strict=True):
        if name is None:
            raise NoSuchModel(
                f"the running daemon has no model {word!r}",
                hint=f"available: {', '.join(names)}; to serve others, run corral stop, then start",
            )
    return tuple(name for name in found if name)


def last_message(messages: Iterable[StreamMessage]) -> StreamMessage:
    """Show load progress, and return the message with the result."""
    meter = ProgressMeter()
    try:
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
    finally:
        meter.clear()
    raise daemon_exited()
