"""Implements `corral capture` (writes requests and responses to a file) and `corral replay`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from difflib import unified_diff
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self, get_args
from urllib.parse import urlsplit

from proxy.cache.prompt_rules import PromptRules, prompt_lines
from proxy.request.request import session_id
from proxy.settings import PromptRule
from supervisor import errors
from supervisor.bench.variants import of_profile
from supervisor.bench.workload import WorkloadFailed
from supervisor.builds.help import FlagValue
from supervisor.builds.installed import engine_setting
from supervisor.cli.batch import KEY_VARIABLE
from supervisor.cli.bench import report_head
from supervisor.cli.targets import choose
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import capture_text
from supervisor.daemon.model_commands import resolve_running
from supervisor.engine.client import Endpoint, EngineClient, EngineUnreachable
from supervisor.experiments import capture_lines as captured
from supervisor.experiments import replay as experiment
from supervisor.experiments.capture_lines import CaptureLimits, model_fingerprint
from supervisor.output import CommandResult, ProgressMeter, one_line, size, table
from supervisor.plan.plan import Plan
from supervisor.system.files import create_new
from supervisor.system.paths import Directories, directories, file_name


class CaptureFile:
    """A new file of mode 0600; raises AccessDenied if it exists or cannot be created.

    Each line is written whole, or, if the disk is full, not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.size_bytes = self.requests = self.responses = 0
        self.end: dict[str, Any] | None = None  # the members of the last line; None before it
        self._began_at_s = time.monotonic()
        self._descriptor = create_new(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_at_s

    def write(self, line: bytes) -> None:
        """Append a line, unless it is empty (a ping of the daemon). Raises OSError."""
        if line == b"\n":
            return
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += len(line)
        self.requests += line.startswith(b'{"type":"request"')
        self.responses += line.startswith(b'{"type":"response"')
        if line.startswith(b'{"type":"end"'):
            self.end = json.loads(line)


_REASONS = {
    "time": "its time is over",
    "requests": "it has reached the limit of requests",
    "size": "it has reached the limit of its size",
    "stopped": "it was stopped",
    "daemon_stopped": "the daemon stopped",
}
_CONTENT = "it contains prompts and answers, but no keys"


def capture(word: str, limits: CaptureLimits, output: Path | None) -> CommandResult:
    """Capture until a limit, Ctrl-C, or the end of the daemon.

    `output`: None for a new file in this directory, named after the model and the time.
    """
    client = Client(directories().control_socket)
    (model,) = resolve_running([word], client.status())
    body = {"model": model, **asdict(limits)}
    now = datetime.now().astimezone()
    file = CaptureFile(output or Path(f"{file_name(model)}-{now:%Y%m%d-%H%M%S}.capture.jsonl"))
    try:
        with file, _stop_on_signals(client.stop_capture):
            _fill(file, client, body, limits.duration_s)
    except OSError as error:
        if not file.requests:
            file.path.unlink(missing_ok=True)
        hint = "name a file on another disk with --output"
        if file.requests:
            hint = f"it has {file.requests} requests, complete up to its last line"
        raise errors.DiskFull(f"cannot write {file.path}: {error.strerror}", hint=hint) from error
    except errors.CorralError:
        if not file.size_bytes:
            file.path.unlink(missing_ok=True)
        raise
    return _result(file)


def show() -> CommandResult:
    running = Client(directories().control_socket).status().capture
    text = capture_text(running) if running else "nothing is captured"
    return CommandResult(running, text)


def stop() -> CommandResult:
    """End the running capture; the command that started it keeps the file."""
    client = Client(directories().control_socket)
    running = client.status().capture
    client.stop_capture()
    return CommandResult(running, "stopped the capture" if running else "nothing is captured")


def _fill(file: CaptureFile, client: Client, body: dict[str, Any], duration_s: float) -> None:
    try:
        with ProgressMeter() as meter:
            for line in client.capture(**body):
                file.write(line)
                done = min(1.0, file.age_s / duration_s)
                meter.show("capturing", done, f"{file.requests} requests, {size(file.size_bytes)}")
    except errors.DaemonBusy:
        if not file.size_bytes:
            raise  # it never began; with a line, the daemon ended in the middle of the capture


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM; an exception would lose a partly read line."""

    def on_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        with suppress(errors.CorralError):
            stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _result(file: CaptureFile) -> CommandResult:
    end = file.end
    dropped = int(end["dropped"]) if end else 0
    data = {
        "path": str(file.path),
        "requests": file.requests,
        "responses": file.responses,
        "dropped": dropped,
        "size_bytes": file.size_bytes,
        "reason": end["reason"] if end else "daemon_lost",
    }
    why = _REASONS.get(str(end["reason"]), "it ended") if end else "the daemon ended suddenly"
    noun = "request" if file.requests == 1 else "requests"
    amounts = f"{file.requests} {noun}, {file.responses} answered, {size(file.size_bytes)}"
    text = f"captured {amounts}; {why}\n{file.path}"
    lost = [f"{dropped} requests or responses were dropped"] if dropped else []
    return CommandResult(data, text, (*lost, _CONTENT), exit_code=0 if end else 1)


_SHOWN_MAX: Final = 20
_PIECE_MAX: Final = 40


def _table(columns: dict[str, experiment.Figures]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, label, digits in (
        ("prefill_rate", "prefill, tokens/s", 1),
        ("decode_rate", "decode, tokens/s", 1),
        ("first_token_ms", "first token, median ms", 0),
    ):
        values = [getattr(column, name) for column in columns.values()]
        ratios = [_number(experiment.ratio(values[-1], value), 2, " ×") for value in values[:-1]]
        rows.append((label, *(_number(value, digits) for value in values), *ratios))
    blank = [""] * (len(columns) - 1)
    found = [f"{column.cached_tokens} of {column.prompt_tokens}" for column in columns.values()]
    rows.append(("tokens found in the cache", *found, *blank))
    generated = [str(column.generated_tokens) for column in columns.values()]
    rows.append(("tokens generated", *generated, *blank))
    rows.append(("failed requests", *(str(column.failed) for column in columns.values()), *blank))
    heads = [f"AGAINST {name}" for name in list(columns)[:-1]]
    return table(("FIGURE", *columns, *heads), rows)


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _piece(text: str) -> str:
    return f"'{one_line(text)[:_PIECE_MAX]}'"


def _ratios(ours: experiment.Figures, theirs: experiment.Figures) -> dict[str, float | None]:
    names = ("prefill_rate", "decode_rate", "first_token_ms")
    return {name: experiment.ratio(getattr(ours, name), getattr(theirs, name)) for name in names}


_CONCURRENCY_MAX: Final = 64
_ONE_ROUND: Final = "one round: speeds cannot be compared"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of `corral replay`; None: as in the capture, or as in the model's settings."""

    model: str | None = None
    engine: str | None = None
    profile: str | None = None
    flags: Mapping[str, FlagValue] | None = None
    is_daemon: bool = False
    is_as_recorded: bool = False  # at the recorded times, not as fast as possible
    concurrency: int | None = None
    config: Path | None = None

    @property
    def changes(self) -> str:
        """The changed settings, in words; empty for the model's present settings."""
        words = [f"engine {self.engine}"] if self.engine else []
        words += [f"profile {self.profile}"] if self.profile else []
        words += [f"{key} = {value}" for key, value in (self.flags or {}).items()]
        return ", ".join(words)


def replay(path: Path, options: ReplayOptions) -> CommandResult:
    played = _Replay(captured.read(path), options)
    try:
        asyncio.run(played.run())
    except KeyboardInterrupt as interrupt:
        raise errors.Interrupted("stopped; its engine has ended") from interrupt
    except (EngineUnreachable, WorkloadFailed) as error:
        raise errors.EngineFailed(f"the replay ended early: {error}") from error
    return played.result()


class _Replay:
    def __init__(self, capture: captured.Capture, options: ReplayOptions) -> None:
        self._capture = capture
        self._requests = capture.requests
        self._options = options
        self._model = options.model or capture.header["model"]
        self._where = directories()
        self._meter = ProgressMeter()
        self._name = "the daemon" if options.is_daemon else options.changes or "present settings"
        greedy = [request for request in self._requests if captured.is_greedy(request.body)]
        texts = {request.number: captured.recorded_text(request) for request in greedy}
        # The captured greedy answers, by number of the request.
        self._recorded = {number: text for number, text in texts.items() if text is not None}
        self._played: list[experiment.Played] = []  # the answers, in the order of the requests
        # Those with the model's present settings, if needed.
        self._baseline: list[experiment.Played] | None = None
        self._plan: Plan | None = None  # None for the daemon
        self._notes: list[str] = []

    async def run(self) -> None:
        expected = self._recorded
        with self._meter:
            if self._options.is_daemon:
                target = nullcontext(_daemon(self._where, self._model))
                self._played = await self._play(self._name, target, expected)
                return
            base, plan = await asyncio.to_thread(self._plans)
            self._plan = plan
            if self._options.changes and len(expected) < len(self._requests):
                engine = experiment.own_engine(base, self._where)
                self._baseline = await self._play("present settings", engine, expected)
                expected = {**experiment.texts(self._requests, self._baseline), **expected}
            engine = experiment.own_engine(plan, self._where)
            self._played = await self._play(self._name, engine, expected)

    def result(self) -> CommandResult:
        capture, model = self._capture, self._capture.header["model"]
        recorded = experiment.recorded_figures(self._requests)
        found = experiment.figures_of(self._played)
        base = experiment.figures_of(self._baseline) if self._baseline else None
        columns = {"RECORDED": recorded, **({"PRESENT": base} if base else {}), "REPLAY": found}
        count = len(self._requests)
        requests = "1 request" if count == 1 else f"{count} requests"
        details = (f"{requests} of {model}", f"played with {self._name}")
        head = report_head(self._plan, *details) if self._plan else ["; ".join(details), ""]
        answers = list(zip(self._requests, self._played, strict=True))
        data = {
            "model": model,
            "played_with": self._name,
            "skipped": dict(capture.skipped),
            "recorded": asdict(recorded),
            "present": asdict(base) if base else None,
            "replay": asdict(found),
            "ratios_to_recorded": _ratios(found, recorded),
            "ratios_to_present": _ratios(found, base) if base else None,
            "requests": [
                {
                    "n": request.number,
                    "failure": answer.failure,
                    "first_token_ms": answer.first_token_ms,
                    "timings": asdict(answer.timings) if answer.timings else None,
                    "compared": answer.is_compared,
                    "difference": asdict(answer.difference) if answer.difference else None,
                }
                for request, answer in answers
            ],
        }
        failures = [
            f"request {request.number} failed: {answer.failure}"
            for request, answer in answers
            if answer.failure
        ]
        skipped = (f"not played: {count} of kind {kind}" for kind, count in capture.skipped.items())
        notes = (*self._notes, *skipped, *failures[:_SHOWN_MAX])
        lines = [_table(columns), "", _ONE_ROUND, *self._answer_lines()]
        text = "\n".join([*head, *lines])
        return CommandResult(data, text, notes, int(bool(found.failed)))

    def _answer_lines(self) -> Iterator[str]:
        compared = sum(answer.is_compared for answer in self._played)
        if not compared:
            yield "no answer is compared: none was captured greedily (temperature 0)"
            return
        pairs = zip(self._requests, self._played, strict=True)
        different = [(request.number, at) for request, played in pairs if (at := played.difference)]
        of_capture = f"{len(self._recorded)} captured ones" if self._recorded else ""
        of_present = "those of the present settings" if self._baseline else ""
        against = " and ".join(filter(None, [of_capture, of_present]))
        yield f"{compared - len(different)} of {compared} answers equal {against}"
        if compared < len(self._requests):
            yield f"{len(self._requests) - compared} are not compared: sampled, cut off or failed"
        for number, at in different[:_SHOWN_MAX]:
            yield (
                f"  request {number}: token {at.token} of {at.tokens} differs: "
                f"{_piece(at.found)} instead of {_piece(at.expected)}"
            )
        if len(different) > _SHOWN_MAX:
            yield f"  and {len(different) - _SHOWN_MAX} more (--json has all)"

    def _plans(self) -> tuple[Plan, Plan]:
        """Return the plans of the present settings and of the changed settings; add notes."""
        options, where = self._options, self._where
        targets = choose([self._model], options.config, where)
        settings, (model,) = targets.loaded.settings, targets.names
        base = of_profile(settings, where, model).plan
        if options.engine:
            engine = {"engine": engine_setting(options.engine)}
            models = {**settings.models, model: settings.models[model].model_copy(update=engine)}
            settings = settings.model_copy(update={"models": models})
        plan = of_profile(settings, where, model, options.profile, options.flags).plan
        self._notes += plan.warnings
        if model_fingerprint(plan.gguf.path) != self._capture.header.get("fingerprint"):
            self._notes.append(f"{plan.gguf.path.name} is not the model file of the capture")
        return base, plan

    async def _play(
        self,
        name: str,
        engine: AbstractAsyncContextManager[experiment.Target],
        expected: Mapping[int, str],
    ) -> list[experiment.Played]:
        count, options = len(self._requests), self._options
        self._meter.show(name, 0.0, "starts")
        async with engine as target:
            most = captured.most_together(self._requests)
            limit = target.slots or _CONCURRENCY_MAX
            player = experiment.Player(
                target,
                self._requests,
                concurrency=min(options.concurrency or most, limit),
                is_as_recorded=options.is_as_recorded,
                on_answer=lambda done: self._meter.show(name, done / count, f"{done} answers"),
            )
            return await player.play(expected)


def _daemon(where: Directories, model: str) -> experiment.Target:
    """Return the running daemon as a target; raises NotRunning, SettingsInvalid."""
    status = Client(where.control_socket).status()
    found = urlsplit(status.url)
    if status.tls_cert or found.hostname is None or found.port is None:
        raise errors.SettingsInvalid(
            "a replay against a daemon with TLS is not possible",
            hint="without --daemon, the replay starts a separate engine",
        )
    endpoint = Endpoint(
        host=f"[{found.hostname}]" if ":" in found.hostname else found.hostname, port=found.port
    )
    key = os.environ.get(KEY_VARIABLE, "")
    return experiment.Target(lambda: EngineClient(endpoint, key), model, 0)


def show_rules(capture_file: Path, rules: Sequence[str], request_id: str | None) -> CommandResult:
    """Show the system prompt and the tools of a captured request before and after rules.

    The rules see the requests before it too, as in the daemon; without an id, the last chat.
    """
    if unknown := set(rules) - set(get_args(PromptRule)):
        names = ", ".join(get_args(PromptRule))
        raise errors.SettingsInvalid(f"no rule is named {min(unknown)}", hint=f"rules: {names}")
    prompt_rules = PromptRules({})
    before: list[str] = []
    after: list[str] = []
    applied: Sequence[str] = ()
    for kind, found_id, members in captured.read_chats(capture_file):
        session = session_id({}, members)
        changed, applied = prompt_rules.apply(rules, kind, members, "", session)
        before, after = (prompt_lines(kind, found) for found in (members, changed))
        if found_id == request_id:
            break
    else:
        if request_id is not None or not before:
            named = f"the request {request_id}" if request_id else "a chat"
            raise errors.NoSuchRequest(
                f"{capture_file} does not have {named}", hint="see corral capture"
            )
    lines = list(unified_diff(before, after, "before", "after", lineterm="", n=1))
    data = {"rules": list(applied), "before": before, "after": after, "diff": lines}
    return CommandResult(data, "\n".join(lines) or "these rules change nothing in this prompt")
