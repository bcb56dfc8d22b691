"""Waits for a batch, and shows how far it is."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from supervisor.commands.batch_client import BatchClient, Object
from supervisor.errors import DaemonBusy, NotRunning
from supervisor.output import ProgressMeter, duration

_ACTIVE: Final = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_POLL_FIRST_S: Final = 0.1
_POLL_MAX_S: Final = 2.0
# A daemon that is restarted drains for up to half a minute, and may replay its database.
_RESTART_MAX_S: Final = 120.0


class Pace:
    """How long the rest takes, by the lines that were done since the first look."""

    def __init__(self, done: int, now_s: float) -> None:
        self._done = done
        self._began_at_s = now_s

    def left_s(self, done: int, total: int, now_s: float) -> float | None:
        """None before a line is done."""
        new = done - self._done
        return (now_s - self._began_at_s) * (total - done) / new if new > 0 else None


def wait(client: BatchClient, batch: Object, meter: ProgressMeter) -> Object:
    """Return the batch at its end; goes on where the daemon is restarted meanwhile.

    Raises:
        DaemonBusy, NotRunning: The daemon has not answered for two minutes.
    """
    pace, pause_s = Pace(_done(batch), time.monotonic()), _POLL_FIRST_S
    try:
        while batch["status"] in _ACTIVE:
            _show(batch, pace, meter)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)
            batch = _current(client, batch, meter)
    finally:
        meter.clear()
    return batch


def _current(client: BatchClient, batch: Object, meter: ProgressMeter) -> Object:
    """Return the batch as it is now, or once the daemon answers again."""
    until_s = time.monotonic() + _RESTART_MAX_S
    while True:
        try:
            return client.get(batch["id"])
        except (DaemonBusy, NotRunning):
            if time.monotonic() >= until_s:
                raise
        meter.show(batch["id"], _fraction(batch), "waits until the daemon runs again")
        time.sleep(_POLL_FIRST_S)
        with suppress(DaemonBusy, NotRunning):
            client.reconnect()


def _show(batch: Object, pace: Pace, meter: ProgressMeter) -> None:
    meter.show(batch["id"], _fraction(batch), _detail(batch, pace))


def _detail(batch: Object, pace: Pace) -> str:
    if reason := batch.get("pause_reason"):
        return f"waits: {reason}"
    if batch["status"] != "in_progress":
        return str(batch["status"])
    counts, done = batch["request_counts"], _done(batch)
    left_s = pace.left_s(done, counts["total"], time.monotonic())
    parts = [f"{done} of {counts['total']} lines"]
    parts += [f"{counts['failed']} failed"] if counts["failed"] else []
    parts += [f"{duration(left_s)} left"] if left_s is not None else []
    return " · ".join(parts)


def _fraction(batch: Object) -> float:
    total = batch["request_counts"]["total"]
    return _done(batch) / total if total else 0.0


def _done(batch: Object) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])
