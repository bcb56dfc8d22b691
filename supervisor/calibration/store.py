"""The measured speeds, by model, engine and machine; one small file each in the cache directory."""

from __future__ import annotations

from dataclasses import asdict
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
        self._write(ThreadMeasurement({**self.read().speeds, threads: speeds}))

    def forget(self) -> None:
        """Measure afresh."""
        self._write(ThreadMeasurement())

    def _write(self, measured: ThreadMeasurement) -> None:
        speeds = {str(count): asdict(one) for count, one in measured.speeds.items()}
        json_cache.put(self._directory, self._key(), {"speeds": speeds})

    def _key(self) -> str:
        return json_cache.key_of(self._files, self._machine)


def _parsed(found: dict[str, Any]) -> ThreadMeasurement:
    try:
        speeds = {int(count): ThreadSpeeds(**one) for count, one in found["speeds"].items()}
        return ThreadMeasurement(speeds)
    except (KeyError, TypeError, ValueError, AttributeError):
        return ThreadMeasurement()  # nothing yet, or of another version
