"""Follows the messages of a command to the last one, and shows what loads meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from supervisor.control.messages import StreamMessage, daemon_exited
from supervisor.errors import Interrupted
from supervisor.output import ProgressMeter


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
