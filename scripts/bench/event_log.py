"""The events that a background daemon logged, one JSON object per line."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from support.corral_cli import CorralCli

from proxy.observe.metrics import waited_ms


@dataclass(frozen=True)
class EventLog:
    """The events of a daemon: `event`, `timestamp`, and the fields of supervisor.events."""

    events: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def loads(self) -> Counter[str]:
        """Return how often each model began to load."""
        changes = self.of("instance.state_changed")
        return Counter(change["model"] for change in changes if change["after"] == "starting")

    def load_s(self) -> dict[str, float]:
        """Return the longest load of each model."""
        began_at: dict[str, datetime] = {}
        duration_s: dict[str, float] = defaultdict(float)
        for event in self.of("instance.state_changed"):
            at, model = datetime.fromisoformat(event["timestamp"]), event["model"]
            if event["after"] == "starting":
                began_at[model] = at
            elif event["after"] == "ready":
                duration_s[model] = max(duration_s[model], (at - began_at[model]).total_seconds())
        return duration_s

    def queued_s(self, model: str = "") -> list[float]:
        """Return the queueing time of each request of a model, or of all."""
        finished = self.of("request.finished")
        return [
            waited_ms(request) / 1000 for request in finished if model in {"", request["model"]}
        ]

    def answer_s(self) -> dict[str, float]:
        """Return the duration of each request without its queueing time, by request id."""
        return {
            event["request"]: (event["duration_ms"] - waited_ms(event)) / 1000
            for event in self.of("request.finished")
        }


def read_event_log(corral: CorralCli) -> EventLog:
    """Read the daemon's log so far."""
    log = (corral.root / "log" / "daemon.log").read_text("utf-8")
    return EventLog([json.loads(line) for line in log.splitlines()])
