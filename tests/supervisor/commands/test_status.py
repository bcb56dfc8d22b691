"""What `corral status` shows."""

from supervisor.commands.status import render
from supervisor.control.wire import DaemonStatus, NodeStatus

STATUS: DaemonStatus = {
    "pid": 1,
    "version": "0",
    "url": "http://127.0.0.1:8080",
    "up_s": 1.0,
    "stopping": False,
    "config": None,
    "models": [],
    "nodes": [],
}


def node(name: str, reason: str | None = None, *models: str) -> NodeStatus:
    state = "down" if reason else "up"
    return {
        "name": name,
        "state": state,
        "reason": reason,
        "url": f"http://{name}:8080",
        "models": list(models),
        "slots": 0 if reason else 4,
        "slots_busy": 0 if reason else 1,
    }


def test_without_nodes_nothing_is_said_of_them() -> None:
    assert "NODE" not in render(STATUS)


def test_nodes_are_shown_with_their_models_and_what_is_wrong() -> None:
    text = render({**STATUS, "nodes": [node("gpu", None, "chat", "tiny"), node("nas", "is away")]})
    lines = [line.split() for line in text.splitlines()]
    assert ["gpu", "up", "1/4", "http://gpu:8080", "chat,", "tiny"] in lines
    assert ["nas", "down", "0/0", "http://nas:8080", "-"] in lines
    assert "nas: is away" in text
