"""The parts of the fuzzer, and the share of the time that each gets."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuzz import files, properties
from fuzz.connections import COUNT, FILES_MAX, Connections
from fuzz.daemon import Daemon
from fuzz.finding import Findings, Limits, Report
from fuzz.http import Http
from fuzz.reload import Reload

_Run = Callable[[int, Limits, Findings, Path], Report]


@dataclass(frozen=True)
class Part:
    """One part, and its share of the time relative to the others."""

    run: _Run
    share: float


def _http(seed: int, limits: Limits, findings: Findings, home: Path) -> Report:
    daemon = Daemon(home)
    try:
        return asyncio.run(Http(daemon, seed, limits, findings).run())
    finally:
        daemon.end()


def _reload(seed: int, limits: Limits, findings: Findings, home: Path) -> Report:
    daemon = Daemon(home)
    try:
        return asyncio.run(Reload(daemon, seed, limits, findings).run())
    finally:
        daemon.end()


def _connections(_seed: int, _limits: Limits, findings: Findings, home: Path) -> Report:
    daemon = Daemon(home, FILES_MAX)
    try:
        return asyncio.run(Connections(daemon, COUNT, findings).run())
    finally:
        daemon.end()


def _files(part: str) -> _Run:
    return functools.partial(files.run, part)


PARTS: Final[Mapping[str, Part]] = {
    "http": Part(_http, 12),
    "settings": Part(_files("settings"), 2),
    "keys": Part(_files("keys"), 1),
    "profiles": Part(_files("profiles"), 1),
    "gguf": Part(_files("gguf"), 2),
    "reload": Part(_reload, 2),
    "connections": Part(_connections, 1),
    "properties": Part(properties.run, 4),
}


def run(
    part: str, seed: int, seconds: float, inputs: int, first: int, findings: Findings
) -> Report:
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        limits = Limits(seconds, inputs, first)
        return PARTS[part].run(seed, limits, findings, Path(directory))
