"""Compares profiles of a model for the dashboard, by `corral bench` as a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from proxy.dashboard.host import BenchJob, BenchWish
from proxy.errors import Conflict, NotFound
from supervisor.backend.machine_models import MachineModelsAdapter
from supervisor.backend.ollama import command_lines, proxy_error
from supervisor.bench.figures import ONE_ROUND
from supervisor.errors import CorralError, from_json
from supervisor.fleet.fleet import Fleet
from supervisor.settings.load import Loaded
from supervisor.system.paths import Directories, make_ours

# Beyond the chosen minutes: first starts, and the round that has begun.
_EXTRA_S: Final = 3600.0


@define(eq=False, slots=False)
class BenchAdapter:
    """Implements `BenchRunner`; a job goes on without a page, and ends with the daemon."""

    _fleet: Fleet
    _models: MachineModelsAdapter
    _loaded: Callable[[], Loaded]
    _directories: Directories
    _job: BenchJob | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def job(self) -> BenchJob | None:
        return self._job

    async def start(self, wish: BenchWish) -> None:
        await asyncio.to_thread(self._models.check, wish.model, wish.profiles)
        if self._task:
            raise Conflict("a bench is running already: cancel it, or wait for its end")
        words = ["bench", "--lines", "--profiles", ",".join(wish.profiles)]
        words += ["--minutes", f"{wish.minutes:g}", f"--workload={wish.workload}"]
        words += ["--report", str(self._report)]
        if path := self._loaded().path:
            words += ["--config", str(path)]
        if wish.force:
            words.append("--force")
        try:
            make_ours(self._directories.cache)
            self._report.unlink(missing_ok=True)
            self._task = self._fleet.spawn(self._run([*words, "--", wish.model], wish.minutes))
        except CorralError as error:
            raise proxy_error(error) from error
        self._job = BenchJob(wish.model, wish.profiles)

    def cancel(self) -> None:
        if self._task is None:
            raise NotFound("no bench is running")
        self._task.cancel()

    async def report(self) -> str:
        try:
            return await asyncio.to_thread(self._report.read_text, "utf-8")
        except OSError as error:
            raise NotFound("there is no report of a bench") from error

    @property
    def _report(self) -> Path:
        return self._directories.cache / "dashboard-bench.html"

    async def _run(self, words: Sequence[str], minutes: float) -> None:
        try:
            async with (
                asyncio.timeout(60 * minutes + _EXTRA_S),
                aclosing(command_lines(words)) as lines,
            ):
                async for line in lines:
                    self._take(line)
            if self._job and self._job.state == "running":
                self._note(state="failed", error="corral bench ended without a result")
        except CorralError as error:
            text = f"{error.message}; {error.hint}" if error.hint else error.message
            self._note(state="failed", error=text)
        except TimeoutError:
            self._note(state="failed", error="it took an hour longer than planned")
        except asyncio.CancelledError:
            self._note(state="cancelled")
            raise
        finally:
            self._task = None

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"error": error}:
                raise from_json(error)
            case {"result": result}:
                failures = [
                    f"{variant['name']} was given up: {variant['failure']}"
                    for variant in result["variants"]
                    if variant["failure"]
                ]
                single = [ONE_ROUND] if result["rounds"] == 1 else []
                notes = (*failures, *single, *result["notes"])
                self._note(state="done", share=1.0, rows=result["rows"], notes=notes)
            case {"share": share, "detail": detail}:
                self._note(share=share, detail=detail)

    def _note(self, **changes: Any) -> None:
        if self._job:
            self._job = replace(self._job, **changes)
