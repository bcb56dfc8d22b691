"""Implements Ollama's API for models: details, residence, downloads and deletion.

Downloads and deletions run `corral` commands as processes: the modules that they need, such as a
client of the hub, would otherwise stay in the daemon's memory.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson
from attrs import define, field

from proxy.errors import Conflict, NotFound, NotServed, ProxyError, StorageFull, Unavailable, quote
from proxy.request.models import ModelDetails, Progress, Residence
from supervisor.errors import CorralError, DaemonBusy, DiskFull, NoSuchModel, from_json
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import gpu_use, ready_estimates
from supervisor.fleet.planner import LaunchPlanner
from supervisor.loading.controller import AdmissionController
from supervisor.models import reference
from supervisor.models.model_meta import capabilities
from supervisor.models.reference import HubReference
from supervisor.settings.schema import FoundModel

_LINE_MAX_BYTES: Final = 1024**2
# After SIGINT, a download writes the bytes that it has received.
_END_S: Final = 5.0


async def command_lines(words: Sequence[str]) -> AsyncGenerator[dict[str, Any], None]:
    """Run a command and yield the JSON objects that it prints, one a line.

    The command is interrupted when the iteration ends. Raises CorralError for anything else.
    """
    async with _running(words) as output:
        async for line in output:
            yield _read(line)


async def command_envelope(words: Sequence[str], argument: str) -> dict[str, Any]:
    """Run a command with --json and return its envelope, or raise CorralError; cancellable.

    The argument is never read as an option.
    """
    async with _running([*words, "--json", "--", argument]) as output:
        found = _read(await output.read())
    if found.get("error"):
        raise from_json(found["error"])
    return found


async def download(name: str) -> AsyncGenerator[Progress, None]:
    """Download a model by `corral model get`; interrupted when the iteration ends.

    Raises CorralError.
    """
    words = ["model", "get", "--lines", "--", name]
    async with aclosing(command_lines(words)) as lines:
        async for line in lines:
            if "error" in line:
                raise from_json(line["error"])
            if "file" in line:
                file, size_bytes = line["file"], line["all_bytes"]
                yield Progress("pulling", file, size_bytes, line["done_bytes"])


@asynccontextmanager
async def _running(words: Sequence[str]) -> AsyncIterator[asyncio.StreamReader]:
    """Yield the output of a command; wait for its end, or interrupt it if the block fails."""
    try:
        process = await asyncio.create_subprocess_exec(
            # -P: files of the working directory are not imported
            *(sys.executable, "-P", "-m", "supervisor.cli", *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=_LINE_MAX_BYTES,
        )
    except OSError as error:
        raise CorralError(f"cannot start a command: {error.strerror}") from error
    assert process.stdout  # noqa: S101 (a pipe was asked for)
    try:
        yield process.stdout
        await process.wait()
    finally:
        if process.returncode is None:
            await _end(process)


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorralError("the command printed something unexpected")
    return found


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


_DOWNLOADS_MAX: Final = 4


@define(eq=False, slots=False)
class OllamaHostAdapter:
    """Models and their files; the models of `serve_found` appear and vanish with their files.

    Args:
        changes: Yields an event that is set after each change of a model's state.
        reload: Runs a reload and returns its result; raises DaemonBusy.
    """

    _fleet: Fleet
    _admission: AdmissionController
    _changes: Callable[[], AbstractContextManager[asyncio.Event]]
    _reload: Callable[[], Awaitable[object]]
    _downloads: int = field(default=0, init=False)

    async def details(self, models: Sequence[str]) -> Mapping[str, ModelDetails]:
        """Return the details of models whose files can be read; reads them in a thread."""
        return await asyncio.to_thread(_details, models, self._fleet.planner)

    def residence(self, model: str) -> Residence:
        estimates = ready_estimates(self._fleet.models.get(model))
        loaded = self._admission.loaded_states().get(model)
        left_s = loaded.unload_in_s if loaded else math.inf
        memory_bytes = sum(
            estimate.host.total + sum(device.total for device in estimate.devices.values())
            for estimate in estimates
        )
        return Residence(
            memory_bytes=memory_bytes,
            gpu_bytes=gpu_use(estimates).memory_bytes,
            unload_in_s=left_s if math.isfinite(left_s) else None,
        )

    def keep_alive(self, model: str, seconds: float) -> None:
        self._admission.keep_alive(model, seconds)

    async def pull(self, name: str) -> AsyncGenerator[Progress, None]:
        """Download a model from the hub, and serve it; raises ProxyError."""
        wanted = hub_reference(name)
        self._check_served("to serve models that clients download")
        if self._downloads >= _DOWNLOADS_MAX:
            raise Unavailable(f"{_DOWNLOADS_MAX} downloads are running; retry later", 10)
        self._downloads += 1
        try:
            yield Progress("pulling manifest")
            try:
                async with aclosing(download(str(wanted))) as steps:
                    async for step in steps:
                        yield step
            except CorralError as error:
                raise proxy_error(error) from error
            yield Progress("verifying sha256 digest")
            await self._apply()
        finally:
            self._downloads -= 1

    async def delete(self, model: str) -> None:
        """Remove the files of a found model, and stop serving it; raises ProxyError."""
        self._check_served("to remove models by their files")
        if not isinstance(self._fleet.planner.settings.models.get(model), FoundModel):
            from supervisor.settings.edit import key_text  # noqa: PLC0415 (tomlkit takes memory)

            key = key_text(("models", model))
            raise NotServed(f"remove [{key}] from corral.toml, and then its file")
        with self._changes() as changed:
            is_unloaded = self._admission.command("unload", [model])
            try:
                async with asyncio.timeout(60.0):
                    while not is_unloaded():
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                raise Conflict(f"{model} still answers requests; retry later") from None
        try:
            await command_envelope(["model", "remove", "--yes"], model)
        except CorralError as error:
            raise proxy_error(error) from error
        await self._apply()

    def _check_served(self, purpose: str) -> None:
        if not self._fleet.planner.settings.serve_found:
            raise NotServed(f"{purpose}, set serve_found = true in corral.toml")

    async def _apply(self) -> None:
        try:
            result = await self._reload()
        except DaemonBusy as error:
            raise Unavailable(f"{error.message}; retry later", 5) from error
        if isinstance(result, CorralError):
            raise Conflict(f"the settings were not read again: {result.message}")


def hub_reference(name: str) -> HubReference:
    """Parse a name on the hub; fetching any URL for clients would make this server a proxy."""
    try:
        wanted = reference.parse_reference(name)
    except NoSuchModel:
        wanted = None
    if isinstance(wanted, HubReference):
        return wanted
    raise NotServed(
        f"{quote(name)} is not on Hugging Face: pull hf.co/OWNER/NAME:QUANT, "
        "such as hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"
    )


def proxy_error(error: CorralError) -> ProxyError:
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    if isinstance(error, DiskFull):
        return StorageFull(text)
    if isinstance(error, DaemonBusy):
        return Unavailable(text)
    return NotFound(text) if isinstance(error, NoSuchModel) else Conflict(text)


def _details(models: Sequence[str], planner: LaunchPlanner) -> Mapping[str, ModelDetails]:
    found: dict[str, ModelDetails] = {}
    for model in models:
        try:
            gguf, projector = planner.gguf(model), planner.projector(model)
        except CorralError:  # its start reports why
            continue
        flags = planner.entry(model).flags
        template = _template(flags) or gguf.chat_template or ""
        able = capabilities(gguf, flags, template, reads_images=projector is not None)
        found[model] = ModelDetails(gguf.architecture, template, able)
    return found


def _template(flags: Mapping[str, object]) -> str:
    """Return the chat template that the settings set in place of the file's."""
    if (path := flags.get("chat-template-file")) is None:
        return str(flags.get("chat-template", ""))
    try:
        with Path(str(path)).open(encoding="utf-8", errors="replace") as file:
            return file.read(1024**2)
    except OSError:  # the model's start reports it
        return ""
