"""What Ollama's API tells of models, and what it does with them (proxy.ollama.host.OllamaHost)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Final

from proxy.ollama.host import ModelDetails, Progress, Residence
from supervisor.admission.controller import AdmissionController
from supervisor.errors import CorralError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.gpu_use import gpu_use
from supervisor.fleet.planner import LaunchPlanner
from supervisor.gguf.capabilities import capabilities
from supervisor.instance.states import State
from supervisor.memory.estimate import Estimate
from supervisor.proxy_adapter.model_files import ModelFilesAdapter

_TEMPLATE_MAX_CHARACTERS: Final = 1024**2


class OllamaHostAdapter:
    def __init__(
        self, fleet: Fleet, admission: AdmissionController, files: ModelFilesAdapter
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._files = files

    async def details(self, models: Sequence[str]) -> Mapping[str, ModelDetails]:
        """Return those of the models whose files can be read; reads them in a thread."""
        return await asyncio.to_thread(_details, models, self._fleet.planner)

    def residence(self, model: str) -> Residence:
        found = self._fleet.models.get(model)  # a reload may have removed it
        estimates = [
            replica.plan.estimate
            for replica in (found.replicas if found else ())
            if replica.plan and replica.instance.snapshot().state is State.READY
        ]
        unloads = self._admission.unload_times().get(model)
        return Residence(
            memory_bytes=sum(map(_memory_bytes, estimates)),
            gpu_bytes=gpu_use(estimates).memory_bytes,
            unload_in_s=unloads.in_s if unloads and math.isfinite(unloads.in_s) else None,
        )

    def keep_alive(self, model: str, seconds: float) -> None:
        self._admission.keep_alive(model, seconds)

    def pull(self, name: str) -> AsyncGenerator[Progress, None]:
        return self._files.pull(name)

    async def delete(self, model: str) -> None:
        await self._files.delete(model)


def _memory_bytes(estimate: Estimate) -> int:
    return estimate.host.total + sum(device.total for device in estimate.devices.values())


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
    """Return the chat template that the settings give in place of the file's."""
    if (path := flags.get("chat-template-file")) is None:
        return str(flags.get("chat-template", ""))
    try:
        with Path(str(path)).open(encoding="utf-8", errors="replace") as file:
            return file.read(_TEMPLATE_MAX_CHARACTERS)
    except OSError:  # the model's start reports it
        return ""
