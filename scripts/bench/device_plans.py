"""Checks the memory plan of the software device: a model that fits, never fits, or runs out.

The engine computes on the device and logs its allocations there; the listing of the device says
that it has 40 MiB, and while memory is to run out, no buffer of more than 10 MiB is allocated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support import software_device
from support.corral_cli import CorralCli
from support.device_daemon import (
    MIB,
    ON_DEVICE,
    TOTAL_MIB,
    ask,
    logged_mib,
    make_model,
    planned_mib,
    settings,
    write_profile,
)

from scripts.bench.result import Result, one_round
from supervisor.builds.discover import load

ERROR_MAX: Final = 0.1
FITS: Final = "a model that fits"
EVICTED: Final = "one that fits after another has left"
NEVER: Final = "one that never fits"
LESS: Final = "one that runs out of memory at its load"
_VERBOSE: Final = "log-verbosity = 4\n"
_OUT_OF_MEMORY_BYTES: Final = 10 * MIB


def check(directory: Path) -> Result:
    """Return the planned and the logged memory of each case, and whether it came as planned."""
    model = make_model(directory)
    goals: dict[str, bool] = {}
    planned: dict[str, float] = {}
    logged: dict[str, float] = {}
    with _daemon(model) as corral:
        for case, name in ((FITS, "a"), (EVICTED, "b")):
            status, _ = ask(corral, name)
            planned[case], logged[case] = planned_mib(corral, name), logged_mib(corral, f"{name}.0")
            goals[f"{case} is loaded"] = status == 200 and corral.model_states()[name] == "loaded"
        goals["the other one has left"] = corral.model_states()["a"] == "unloaded"
        status, text = ask(corral, "never")
        goals[f"{NEVER} is refused, with what would fit"] = status == 503 and "never fit" in text
    with _daemon(model, out_of_memory=True) as corral:
        status, _ = ask(corral, "less")
        planned[LESS], logged[LESS] = planned_mib(corral, "less"), logged_mib(corral, "less.0")
        steps = [(event["key"], event["after"]) for event in corral.events("model.reduced")]
        goals[f"{LESS} is served with half of its context"] = (status, steps) == (
            200,
            [("ctx-size", 4096)],
        )
    for case, size in planned.items():
        is_near = abs(size / logged[case] - 1) < ERROR_MAX
        goals[f"{case}: the plan is within {ERROR_MAX:.0%} of the engine's log"] = is_near
    return Result(
        [
            one_round("planned memory of the device, by case", "MiB", planned),
            one_round("the same in the engine's log", "MiB", logged),
        ],
        goals,
    )


@contextmanager
def _daemon(model: Path, *, out_of_memory: bool = False) -> Iterator[CorralCli]:
    with tempfile.TemporaryDirectory(prefix="c") as home:
        corral = CorralCli(Path(home))
        corral.env["CORRAL_CACHE_DIR"] = str(Path(home) / "cache")
        if out_of_memory:
            corral.env |= software_device.limit_buffers(_OUT_OF_MEMORY_BYTES)
        engine = load(None, cache_dir=Path(home) / "cache")
        device = software_device.write_engine(
            Path(home), engine.path, TOTAL_MIB, engine.library_dirs
        )
        write_profile(corral, _VERBOSE)
        corral.configure(_settings(device.engine, model))
        try:
            corral.ok("start")
            yield corral
        finally:
            corral.end()


def _settings(engine: Path, model: Path) -> str:
    own = f"{ON_DEVICE}{_VERBOSE}"
    return settings(
        engine,
        model,
        "device_memory_wait_s = 0.5",
        a=f"[models.a.flags]\n{own}",
        b=f"[models.b.flags]\n{own}",
        never=f"[models.never.flags]\n{own.replace('8192', '32768')}",
        less='profile = "device"\n',
    )
