"""A running capture on the control socket. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.control.messages import CaptureStatus

if TYPE_CHECKING:
    from supervisor.capture.recording import Recording


def capture_status(running: Recording | None) -> CaptureStatus | None:
    if running is None:
        return None
    counts = running.counts
    return {
        "model": running.model,
        "requests": counts.requests,
        "responses": counts.responses,
        "dropped": counts.dropped,
        "size_bytes": running.size_bytes,
        "left_s": round(running.left_s, 1),
    }
