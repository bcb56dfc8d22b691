"""What a daemon in the background told of itself: its log, one event a line."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from end_to_end.home import Corral


@dataclass(frozen=True)
class Told:
    """The events of a daemon.

    Attributes:
        events: In their order: `event`, `timestamp`, and the fields of supervisor.events.
    """

    events: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [event for event in self.events if event["event"] == name]

    def loads(self) -> Counter[str]:
        """Return how many times each model came into memory, or began to."""
        changes = self.of("instance.state_changed")
        return Counter(one["model"] for one in changes if one["after"] == "starting")

    def load_s(self) -> dict[str, float]:
        """Return how long each model's loads took, the longest."""
        began_at: dict[str, datetime] = {}
        took_s: dict[str, float] = defaultdict(float)
        for one in self.of("instance.state_changed"):
            at, model = datetime.fromisoformat(one["timestamp"]), one["model"]
            if one["after"] == "starting":
                began_at[model] = at
            elif one["after"] == "ready":
                took_s[model] = max(took_s[model], (at - began_at[model]).total_seconds())
        return took_s

    def waits_s(self, model: str = "") -> list[float]:
        """Return how long each request of a model, or of all, waited for its turn."""
        finished = self.of("request.finished")
        return [one["queued_ms"] / 1000 for one in finished if model in {"", one["model"]}]

    def answer_s(self) -> dict[str, float]:
        """Return how long each answer took once its turn had come, by the request's name."""
        return {
            one["request"]: (one["duration_ms"] - one["queued_ms"]) / 1000
            for one in self.of("request.finished")
        }


def told(corral: Corral) -> Told:
    """Return what the daemon of a home told so far."""
    log = (corral.home / "log" / "daemon.log").read_text("utf-8")
    return Told([json.loads(line) for line in log.splitlines()])
