"""Downloads and removes models for clients of Ollama's API, by commands of `corral`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final

from proxy.errors import Conflict, NotFound, NotServed, ProxyError, StorageFull, Unavailable, quoted
from proxy.ollama.host import Progress
from supervisor.errors import CorralError, DaemonBusy, DiskFull, NoSuchModel, from_json
from supervisor.hub import reference
from supervisor.hub.reference import HubReference
from supervisor.proxy_adapter import corral_process
from supervisor.settings.schema import FoundModel, Settings

_DOWNLOADS_MAX: Final = 4
_UNLOAD_S: Final = 60.0


class ModelFilesAdapter:
    """The models of `serve_found`, which come and go with their files.

    Args:
        settings: Returns those that apply now.
        unload: Begins to unload a model; returns a test for its end.
        changes: Yields what is set after each change of a model's state.
        reload: Begins a reload, and returns its result; raises DaemonBusy.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        unload: Callable[[str], Callable[[], bool]],
        changes: Callable[[], AbstractContextManager[asyncio.Event]],
        reload: Callable[[], Awaitable[object]],
    ) -> None:
        self._settings = settings
        self._unload = unload
        self._changes = changes
        self._reload = reload
        self._downloads = 0

    async def pull(self, name: str) -> AsyncGenerator[Progress, None]:
        """Download a model of the hub, and serve it; raises ProxyError."""
        wanted = _reference(name)
        self._check_served("to serve models that clients download")
        if self._downloads >= _DOWNLOADS_MAX:
            raise Unavailable(f"{_DOWNLOADS_MAX} downloads are running; retry later", 10)
        self._downloads += 1
        try:
            yield Progress("pulling manifest")
            words = ["model", "get", "--lines", "--", str(wanted)]
            async with aclosing(_steps(words)) as steps:
                async for step in steps:
                    yield step
            yield Progress("verifying sha256 digest")
            await self._apply()
        finally:
            self._downloads -= 1

    async def delete(self, model: str) -> None:
        """Remove the files of a model that was found, and serve it no more; raises ProxyError."""
        self._check_served("to remove models by their files")
        if not isinstance(self._settings().models.get(model), FoundModel):
            raise NotServed(f"remove [models.{model}] from corral.toml, and then its file")
        await self._unloaded(model)
        try:
            await corral_process.envelope(["model", "remove", "--yes", model])
        except CorralError as error:
            raise _proxy_error(error) from error
        await self._apply()

    def _check_served(self, purpose: str) -> None:
        if not self._settings().serve_found:
            raise NotServed(f"{purpose}, set serve_found = true in corral.toml")

    async def _unloaded(self, model: str) -> None:
        with self._changes() as changed:
            is_over = self._unload(model)
            try:
                async with asyncio.timeout(_UNLOAD_S):
                    while not is_over():
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                raise Conflict(f"{model} still answers requests; retry later") from None

    async def _apply(self) -> None:
        try:
            result = await self._reload()
        except DaemonBusy as error:
            raise Unavailable(f"{error.message}; retry later", 5) from error
        if isinstance(result, CorralError):
            raise Conflict(f"the settings were not read again: {result.message}")


async def _steps(words: list[str]) -> AsyncGenerator[Progress, None]:
    try:
        async with aclosing(corral_process.lines(words)) as lines:
            async for line in lines:
                if "error" in line:
                    raise from_json(line["error"])
                if "file" in line:
                    yield _progress(line)
    except CorralError as error:
        raise _proxy_error(error) from error


def _progress(line: dict[str, Any]) -> Progress:
    return Progress("pulling", line["file"], line["all_bytes"], line["done_bytes"])


def _reference(name: str) -> HubReference:
    """Read a name of the hub; a server that fetched any URL for its clients would be a proxy."""
    try:
        wanted = reference.parse(name)
    except NoSuchModel:
        wanted = None
    if isinstance(wanted, HubReference):
        return wanted
    raise NotServed(
        f"{quoted(name)} is not on Hugging Face: pull hf.co/OWNER/NAME:QUANT, "
        "such as hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"
    )


def _proxy_error(error: CorralError) -> ProxyError:
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    if isinstance(error, DiskFull):
        return StorageFull(text)
    return NotFound(text) if isinstance(error, NoSuchModel) else Conflict(text)
