"""A running capture in words."""

from __future__ import annotations

from supervisor.control.messages import CaptureStatus
from supervisor.output import duration, size


def capture_text(one: CaptureStatus) -> str:
    dropped = f", {one['dropped']} dropped" if one["dropped"] else ""
    return (
        f"{one['model']}: its requests are captured, {one['requests']} so far{dropped}, "
        f"{size(one['size_bytes'])}, for {duration(one['left_s'])} more"
    )
