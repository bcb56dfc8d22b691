"""Which of the daemon's events are told to hooks."""

from __future__ import annotations

from datetime import UTC, datetime

from supervisor.engine.exit_cause import known_cause
from supervisor.events import Event
from supervisor.service.hook_commands import HookEvent
from supervisor.service.hooks import HookObserver

AT = datetime(2026, 11, 22, tzinfo=UTC)
KILLED = known_cause("SIGKILL")


class Told:
    """The calls of an observer for events."""

    def __init__(self) -> None:
        self.observer = HookObserver(lambda _: KILLED)

    def state(self, *after: str, instance: str = "chat.0") -> list[tuple[str, str | None]]:
        found = [
            self.observe("instance.state_changed", instance=instance, model="chat", after=entry)
            for entry in after
        ]
        return [
            (entry.event, entry.cause.code if entry.cause else None)
            for entry in found
            if entry is not None
        ]

    def observe(self, name: str, **fields: object) -> HookEvent | None:
        return self.observer.observe(Event(name, AT, fields))


def test_a_model_is_loaded_with_its_first_instance_and_unloaded_with_its_last() -> None:
    told = Told()
    assert told.state("starting", "warming", "ready") == [("model_loaded", None)]
    assert told.state("starting", "ready", instance="chat.1") == []
    assert told.state("unhealthy", "ready", "draining", "stopping", "stopped") == []
    assert told.observer.loaded_models == {"chat"}
    gone = told.state("draining", "stopped", instance="chat.1")
    assert gone == [("model_unloaded", "stopped")]
    assert told.observer.loaded_models == frozenset()


def test_the_cause_of_an_unloading_is_why_it_was_done() -> None:
    told = Told()
    told.state("ready")
    told.observe("model.unloaded", model="chat", reason="no request came within ttl_s")
    assert told.state("draining", "stopped") == [("model_unloaded", "unloaded")]
    told.state("ready")
    assert told.state("draining", "stopping", "starting") == [("model_unloaded", "restarted")]
    told.state("ready")
    told.observe("daemon.stopping", reason="SIGTERM received")
    assert told.state("draining", "stopped") == [("model_unloaded", "daemon_stops")]


def test_a_crash_is_a_failure_and_no_unloading() -> None:
    told = Told()
    told.state("ready")
    assert told.state("backoff") == [("model_failed", "killed")]
    assert told.state("starting", "ready") == [("model_loaded", None)]
    assert told.state("failed") == []
    given_up = told.observe(
        "instance.failed",
        instance="chat.0",
        model="chat",
        failures=5,
        code="killed",
        reason="a crash",
        hint=None,
        log="/l",
    )
    assert given_up
    assert given_up.cause
    assert (given_up.restarts, given_up.cause.message, given_up.cause.log) == (
        False,
        "a crash",
        "/l",
    )


def test_a_node_is_down_once_and_up_only_after_that() -> None:
    told = Told()
    assert told.observe("node.up", node="gpu", models=[]) is None
    down = told.observe("node.draining", node="gpu")
    assert down
    assert down.event == "node_down"
    assert told.observe("node.down", node="gpu", reason="connection refused") is None
    up = told.observe("node.up", node="gpu", models=[])
    assert up
    assert (up.event, up.node) == ("node_up", "gpu")
