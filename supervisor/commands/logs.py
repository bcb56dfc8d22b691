"""`corral logs`: what the engines, or the daemon, wrote."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from supervisor.errors import NoSuchModel
from supervisor.host.paths import Directories, directories
from supervisor.life.follow import follow, tail
from supervisor.show import Outcome


def logs(model: str | None, lines: int, *, go_on: bool) -> Outcome:
    """Show the last lines of a log; to go on, print each new line until Ctrl-C.

    Raises:
        NoSuchModel: No log of that name was ever written.
    """
    files = _files(model, directories())
    if go_on:
        asyncio.run(_print_all(files, lines))
    last = [line for file in files for line in tail(file, lines)]
    return Outcome({"files": [str(file) for file in files], "lines": last}, "\n".join(last))


async def _print_all(files: Sequence[Path], lines: int) -> None:
    async with asyncio.TaskGroup() as readers:
        for file in files:
            readers.create_task(_print(file, lines, f"{file.stem}: " if len(files) > 1 else ""))


async def _print(file: Path, lines: int, prefix: str) -> None:
    async for line in follow(file, lines):
        sys.stdout.write(f"{prefix}{line}\n")
        sys.stdout.flush()


def _files(model: str | None, where: Directories) -> list[Path]:
    if model is None:
        return [where.daemon_log]
    found = sorted(file for file in where.log.glob("*.log") if _belongs(file.stem, model))
    if found:
        return found
    known = sorted({file.stem.rpartition(".")[0] for file in where.log.glob("*.*.log")})
    raise NoSuchModel(
        f"there is no log of {model!r} in {where.log}",
        hint=f"logs there are of: {', '.join(known)}" if known else "nothing has run yet",
    )


def _belongs(stem: str, model: str) -> bool:
    """Tell whether a log is of a model, of a replica NAME.0, or of an instance NAME.0~2 of it."""
    return model in {stem, stem.partition("~")[0], stem.rpartition(".")[0]}
