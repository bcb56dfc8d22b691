"""The measured speeds, by model, engine and machine; one small file each in the cache directory."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from supervisor.flags.thread_speeds import ThreadMeasurement, ThreadSpeeds
from supervisor.host import json_cache
from supervisor.host.machine import Machine


class MeasurementStore:
    """The measurements of one model with one engine on one machine."""

    def __init__(self, cache_dir: Path, model: Path, engine: Path, machine: Machine) -> None:
        self._directory = cache_dir / "thread_speeds"
        self._files = (model, engine)
        self._machine = f"{machine.physical_cores} {' '.join(sorted(machine.cpu_flags))}"

    def read(self) -> ThreadMeasurement:
        try:
            found = json_cache.get(self._directory, self._key())
        except OSError:
            return ThreadMeasurement()
        return _parsed(found or {})

    def add(self, threads: int, speeds: ThreadSpeeds) -> None:
        """Store the speeds of one count."""
        before = self.read()
        self._write(replace(before, speeds={**before.speeds, threads: speeds}))

    def complete(self) -> None:
        """Measure no further counts."""
        self._write(replace(self.read(), is_complete=True))

    def _write(self, measured: ThreadMeasurement) -> None:
        speeds = {str(count): asdict(one) for count, one in measured.speeds.items()}
        value = {"speeds": speeds, "is_complete": measured.is_complete}
        json_cache.put(self._directory, self._key(), value)

    def _key(self) -> str:
        return json_cache.key_of(self._files, self._machine)


def _parsed(found: dict[str, Any]) -> ThreadMeasurement:
    try:
        speeds = {int(count): ThreadSpeeds(**one) for count, one in found["speeds"].items()}
        return ThreadMeasurement(speeds, bool(found["is_complete"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return ThreadMeasurement()  # nothing yet, or of another version
