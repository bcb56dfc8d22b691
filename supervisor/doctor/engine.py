"""Looks at the engine: whether one runs here, what it can do, and whether this CPU suits it."""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.doctor.finding import Finding
from supervisor.engines.discover import Engine


def check_engine(engine: Engine) -> Iterator[Finding]:
    """Yield what is true of the engine that is used."""
    build = f"build {engine.build}" if engine.build else "build unknown"
    about = f"{build} ({engine.version}), from {engine.source}: {engine.path}"
    yield Finding("engine", "ok", about)
    yield _check_cpu(engine)
    yield Finding("devices", "ok", _devices(engine))


def _check_cpu(engine: Engine) -> Finding:
    if engine.warning:
        fault, _, cure = engine.warning.rpartition("; ")
        return Finding("cpu", "fail", fault or cure, cure if fault else None)
    return Finding("cpu", "ok", engine.note or "has every feature that the engine is known to need")


def _devices(engine: Engine) -> str:
    found = [
        f"{device.name}: {device.description}"
        + (f", {device.total_mib} MiB" if device.total_mib else "")
        for device in engine.devices
    ]
    return "; ".join(found) or "none; layers run on the CPU"
