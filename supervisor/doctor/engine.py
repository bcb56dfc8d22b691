"""Checks the engine: its build, whether this CPU supports it, and its devices."""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.doctor.finding import Finding
from supervisor.engines.discover import Engine


def check_engine(engine: Engine) -> Iterator[Finding]:
    build = f"build {engine.build}" if engine.build else "build unknown"
    text = f"{build} ({engine.version}), from {engine.source}: {' '.join(engine.command)}"
    yield Finding("engine", "ok", text)
    yield _check_cpu(engine)
    yield Finding("devices", "ok", _devices(engine))


def _check_cpu(engine: Engine) -> Finding:
    if engine.warning:
        fault, _, fix = engine.warning.rpartition("; ")
        return Finding("cpu", "fail", fault or fix, fix if fault else None)
    return Finding("cpu", "ok", engine.note or "has every instruction set that the engine needs")


def _devices(engine: Engine) -> str:
    found = [
        f"{device.name}: {device.description}"
        + (f", {device.total_mib} MiB" if device.total_mib else "")
        for device in engine.devices
    ]
    return "; ".join(found) or "none; layers run on the CPU"
