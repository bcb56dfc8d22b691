"""`corral logs`: the logs of the engines, or of the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from supervisor.errors import NoSuchModel
from supervisor.host.paths import Directories, directories, name_of_file
from supervisor.output import CommandResult, write
from supervisor.process.log_file import follow, tail


def logs(model: str | None, lines: int, *, keep_reading: bool, raw: bool) -> CommandResult:
    """Show the last lines of a model's logs (None: the daemon's), or follow them until Ctrl-C.

    `raw` passes control characters on to the terminal.
    """
    files = _files(model, directories())
    if keep_reading:
        asyncio.run(_print_all(files, lines, raw=raw))
    last = [line for file in files for line in tail(file, lines)]
    data = {"files": [str(file) for file in files], "lines": last}
    return CommandResult(data, "\n".join(last), is_raw=raw)


async def _print_all(files: Sequence[Path], lines: int, *, raw: bool) -> None:
    async with asyncio.TaskGroup() as readers:
        for file in files:
            prefix = f"{name_of_file(file.stem)}: " if len(files) > 1 else ""
            readers.create_task(_print(file, lines, prefix, raw=raw))


async def _print(file: Path, lines: int, prefix: str, *, raw: bool) -> None:
    async for line in follow(file, lines):
        write(f"{prefix}{line}", raw=raw)


def _files(model: str | None, where: Directories) -> list[Path]:
    if model is None:
        return [where.daemon_log]
    by_instance = where.engine_logs()
    found = [path for instance, path in by_instance.items() if _belongs(instance, model)]
    if found:
        return found
    known = sorted({instance.rpartition(".")[0] for instance in by_instance})
    raise NoSuchModel(
        f"{where.log} has no log of {model!r}",
        hint=f"it has logs of: {', '.join(known)}" if known else "no model has run yet",
    )


def _belongs(instance: str, model: str) -> bool:
    """Match a model, a replica NAME.0, or a replacement instance NAME.0~2."""
    return model in {instance, instance.partition("~")[0], instance.rpartition(".")[0]}
