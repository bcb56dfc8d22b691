"""Parts of a status in a few words."""

from __future__ import annotations

from typing import Final

from supervisor.control.messages import DaemonStatus, InstanceStatus, ModelStatus

ADD_KEY: Final = "corral key add NAME adds a key; then set api_keys_file under [proxy]"


def state_text(model: ModelStatus, instance: InstanceStatus) -> str:
    if instance["state"] == "stopped" and model["state"] == "unloaded":
        # A request loads it, unlike a model that was stopped.
        return "waiting" if model["waiting"] else "unloaded"
    if instance["state"] == "starting" and instance["progress"] is not None:
        return f"starting {instance['progress']:.0%}"
    if instance["retry_in_s"] is not None:
        return f"backoff {instance['retry_in_s']:.0f} s"
    return instance["state"]


def failed_text(instance: InstanceStatus) -> str | None:
    """Say how an instance that has failed starts again; None for others."""
    if instance["state"] != "failed":
        return None
    model = instance["name"].rpartition(".")[0]
    return f"it is not restarted any more; `corral start {model}` starts it again"


def keyless_warning(status: DaemonStatus) -> tuple[str, ...]:
    """Say that other machines can send requests without a key."""
    if not status["keyless"]:
        return ()
    addresses = " and ".join(status["keyless"])
    return (f"other machines can reach {addresses}, and no key is required: {ADD_KEY}",)
