"""`corral replay`: the requests of a capture against other settings, builds, or the daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from supervisor.bench.variants import of_profile
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.capture.header import model_fingerprint
from supervisor.commands.batch_client import KEY_VARIABLE
from supervisor.commands.replay_result import Outcome, replay_result
from supervisor.commands.targets import choose
from supervisor.control.canary_request import engine_setting
from supervisor.control.client import Client
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.engine_client.endpoint import Endpoint
from supervisor.engines.help import FlagValue
from supervisor.errors import EngineFailed, Interrupted, SettingsInvalid
from supervisor.flags.plan import Plan
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult, ProgressMeter
from supervisor.replay.answer import recorded_text
from supervisor.replay.capture import Capture, read
from supervisor.replay.played_request import PlayedRequest, is_greedy, most_together, played
from supervisor.replay.run import Play, Target, own_engine, play

_CONCURRENCY_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of the command line.

    Attributes:
        model: To play with; None: the capture's.
        engine: A build or a path; None: the model's.
        profile: None: the model's.
        flags: On top of those of the model.
        is_daemon: Play against the running daemon.
        concurrency: None: as many as were in flight at once.
    """

    model: str | None = None
    engine: str | None = None
    profile: str | None = None
    flags: Mapping[str, FlagValue] | None = None
    is_daemon: bool = False
    is_as_recorded: bool = False
    concurrency: int | None = None
    config: Path | None = None

    @property
    def changes(self) -> str:
        """What is played with, in words; empty for the model's present settings."""
        words = [f"engine {self.engine}"] if self.engine else []
        words += [f"profile {self.profile}"] if self.profile else []
        words += [f"{key} = {value}" for key, value in (self.flags or {}).items()]
        return ", ".join(words)


def replay(path: Path, options: ReplayOptions) -> CommandResult:
    capture = read(path)
    requests = played(capture.requests)
    try:
        outcome = asyncio.run(_Replay(capture, requests, options).run())
    except KeyboardInterrupt as interrupt:
        raise Interrupted("stopped; its engine has ended, nothing is left behind") from interrupt
    except (EngineUnreachable, WorkloadFailed) as error:
        raise EngineFailed(f"the replay ended early: {error}") from error
    return replay_result(capture, requests, outcome)


class _Replay:
    def __init__(
        self, capture: Capture, requests: Sequence[PlayedRequest], options: ReplayOptions
    ) -> None:
        self._capture = capture
        self._requests = requests
        self._options = options
        self._where = directories()
        self._meter = ProgressMeter()

    async def run(self) -> Outcome:
        try:
            if self._options.is_daemon:
                return await self._against_daemon()
            return await self._against_own_engine()
        finally:
            self._meter.clear()

    async def _against_daemon(self) -> Outcome:
        target = _daemon(self._where, self._options.model or self._capture.model)
        found = await self._play("the daemon", nullcontext(target), self._recorded())
        return Outcome("the daemon", found, None, len(self._recorded()))

    async def _against_own_engine(self) -> Outcome:
        options = self._options
        base, plan, notes = await asyncio.to_thread(self._plans)
        expected, baseline = self._recorded(), None
        recorded = len(expected)
        if options.changes and recorded < len(self._requests):
            engine = own_engine(base, self._where)
            baseline = await self._play("present settings", engine, expected)
            expected = {**baseline.texts(self._requests), **expected}
        name = options.changes or "present settings"
        found = await self._play(name, own_engine(plan, self._where), expected)
        return Outcome(name, found, baseline, recorded, notes)

    def _plans(self) -> tuple[Plan, Plan, tuple[str, ...]]:
        """Return the plans of the present settings and of those to play with."""
        options, where = self._options, self._where
        targets = choose([options.model or self._capture.model], options.config, where)
        settings, (model,) = targets.loaded.settings, targets.names
        base = of_profile(settings, where, model).plan
        if options.engine:
            own = settings.models[model].model_copy(
                update={"engine": engine_setting(options.engine)}
            )
            models = {**settings.models, model: own}
            settings = settings.model_copy(update={"models": models})
        plan = of_profile(settings, where, model, options.profile, options.flags).plan
        notes = [*plan.warnings]
        if model_fingerprint(plan.gguf.path) != self._capture.header.get("fingerprint"):
            notes.append(f"{plan.gguf.path.name} is not the file that was captured")
        return base, plan, tuple(notes)

    def _recorded(self) -> dict[int, str]:
        """Return the captured answers that were greedy, by number."""
        greedy = [one.captured for one in self._requests if is_greedy(one.captured.body)]
        texts = {one.number: recorded_text(one) for one in greedy}
        return {number: text for number, text in texts.items() if text is not None}

    async def _play(
        self,
        name: str,
        engine: AbstractAsyncContextManager[Target],
        expected: Mapping[int, str],
    ) -> Play:
        count, options = len(self._requests), self._options
        self._meter.show(name, 0.0, "starts")
        async with engine as target:
            most = most_together(self._requests)
            limit = target.slots or _CONCURRENCY_MAX
            return await play(
                target,
                self._requests,
                expected,
                concurrency=min(options.concurrency or most, limit),
                is_as_recorded=options.is_as_recorded,
                on_answer=lambda done: self._meter.show(name, done / count, f"{done} answers"),
            )


def _daemon(where: Directories, model: str) -> Target:
    """Return the running daemon as a target; raises NotRunning, SettingsInvalid."""
    status = Client(where.control_socket).status()
    found = urlsplit(status["url"])
    if status["tls_cert"] or found.hostname is None or found.port is None:
        raise SettingsInvalid(
            "a replay against a daemon with TLS is not possible",
            hint="leave out --daemon: it starts an engine of its own",
        )
    endpoint = Endpoint(
        host=f"[{found.hostname}]" if ":" in found.hostname else found.hostname, port=found.port
    )
    key = os.environ.get(KEY_VARIABLE, "")
    return Target(lambda: EngineClient(endpoint, key), model, 0)
