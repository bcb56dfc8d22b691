"""The state of an instance in a few words."""

from __future__ import annotations

from supervisor.control.messages import InstanceStatus, ModelStatus


def state_text(model: ModelStatus, instance: InstanceStatus) -> str:
    if instance["state"] == "stopped" and model["state"] == "unloaded":
        # A request loads it, unlike a model that was stopped.
        return "waiting" if model["waiting"] else "unloaded"
    if instance["state"] == "starting" and instance["progress"] is not None:
        return f"starting {instance['progress']:.0%}"
    if instance["retry_in_s"] is not None:
        return f"backoff {instance['retry_in_s']:.0f} s"
    return instance["state"]
