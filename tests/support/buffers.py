"""Compares the real engine's logged allocations with the estimate."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue
from supervisor.engine.launch import ROUTER_ENV, clean_environment
from supervisor.models import metadata
from supervisor.plan.estimate import MemoryBreakdown, MemoryInputs, estimate
from supervisor.plan.render import render
from supervisor.system import machine

PARTS: Final = ("weights", "kv", "compute", "output")
_MIB: Final = 1024**2
_LINES: Final = {
    "weights": "model buffer size",
    "kv": "KV buffer size",
    "compute": "compute buffer size",
    "output": "output buffer size",
}
_STARTED: Final = '"state":"ready"'


@dataclass(frozen=True)
class Comparison:
    """One case.

    Attributes:
        flags: Options of the engine.
        logged: Bytes by part.
        estimated: Bytes by part; all of a draft model as one part.
    """

    flags: Mapping[str, FlagValue]
    logged: Mapping[str, float]
    estimated: Mapping[str, float]

    @property
    def error(self) -> float:
        """Relative error of the estimated total; below 0, too low."""
        return sum(self.estimated.values()) / sum(self.logged.values()) - 1

    def part_error(self, part: str) -> float:
        """The same for one part; the log has two decimals of a MiB."""
        return self.estimated[part] / self.logged[part] - 1


def compare(
    engine: Engine,
    model: Path,
    flags: Mapping[str, FlagValue],
    *,
    draft: Path | None = None,
    device: str | None = None,
) -> Comparison:
    """Start an engine on a model until it serves, and compare its log.

    Args:
        engine: The engine.
        model: A GGUF.
        flags: Options by today's names.
        draft: A GGUF that drafts for it, or None.
        device: Compare what it takes of this device; None: what it takes in all.
    """
    if draft:
        flags = {**flags, "spec-type": "draft-simple", "spec-draft-model": str(draft)}
    with tempfile.TemporaryDirectory() as cache:
        facts = metadata.read(model, cache_dir=Path(cache))
        drafts = metadata.read(draft, cache_dir=Path(cache)) if draft else None
    # The log has the whole mapped file, also what is repacked; so does a plan that locks it.
    chosen = {"load-mode": "mmap+mlock", **flags}
    found = estimate(MemoryInputs(facts, chosen, engine, machine.cpu_flags(), drafts))
    take = found.devices[device] if device else found.host
    return Comparison(flags, _logged(engine, model, flags, device), _by_part(take))


def _by_part(take: MemoryBreakdown) -> dict[str, float]:
    found = {part: float(getattr(take, part)) for part in (*PARTS, "draft")}
    return found | {"weights": float(take.weights + take.copies)}


def _logged(
    engine: Engine, model: Path, flags: Mapping[str, FlagValue], device: str | None
) -> dict[str, float]:
    rendered, _ = render({"fit": "off", **flags, "threads": 1, "warmup": False}, engine.flags)
    words = [word for line in rendered for word in (line.flag, line.value) if word]
    argv = [str(engine.path), "--model", str(model), "--port", "0", "--log-verbosity", "4"]
    environment = clean_environment(
        os.environ,
        program=engine.path,
        library_dirs=engine.library_dirs,
        api_key="k",
        marker="memory",
    )
    with subprocess.Popen(
        [*argv, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, ROUTER_ENV: "1"},
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            lines = list(_until_started(process))
            assert _STARTED in lines[-1], f"{words}: {process.returncode}: {''.join(lines[-5:])}"
            rest, _ = process.communicate()  # its stdin closes, and it ends
        finally:
            process.kill()
    return logged_bytes([*lines, *rest.splitlines()], device)


def logged_bytes(lines: Sequence[str], device: str | None = None) -> dict[str, float]:
    """Return the bytes by part that an engine logs, of one device or of all memory."""
    return {part: sum(_sizes(lines, device or "", words)) for part, words in _LINES.items()}


def _until_started(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout
    for line in process.stdout:
        yield line
        if _STARTED in line:
            return


def _sizes(lines: Sequence[str], device: str, words: str) -> Iterator[float]:
    pattern = re.compile(rf"{device} +{words} = +([\d.]+) MiB")
    return (float(found[1]) * _MIB for line in lines if (found := pattern.search(line)))
