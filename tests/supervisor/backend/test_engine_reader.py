"""The supervisor's reports of the engine and its GPUs to the proxy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.samples import GPU, engine, machine, model

from proxy.errors import Unavailable
from proxy.request.models import GpuUse
from supervisor.backend.models import LocalModels
from supervisor.builds.discover import Device
from supervisor.engine.states import State
from supervisor.errors import EngineMissing
from supervisor.events import EventStream
from supervisor.fleet.model import gpu_use
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.system.paths import shipped_directory


def planned(*devices: Device, **flags: Any) -> Plan:
    found = model()
    entry = ModelEntry("chat", found.path, flags=flags)
    base = load("base", (shipped_directory("profiles"),))
    return make_plan(entry, base, engine("b10434", *devices), found, machine(), instances=1)


def adapter(*replicas: tuple[Plan | None, State], failure: Exception | None = None) -> Any:
    def found() -> object:
        if failure:
            raise failure
        return engine("b10434", GPU)

    made = [
        SimpleNamespace(
            plan=plan,
            instance=SimpleNamespace(snapshot=lambda state=state: SimpleNamespace(state=state)),
        )
        for plan, state in replicas
    ]
    fleet = SimpleNamespace(
        models={"chat": SimpleNamespace(replicas=made)}, planner=SimpleNamespace(engine=found)
    )
    return LocalModels(cast("Any", fleet), cast("Any", None), EventStream())


def test_the_memory_of_all_ready_instances_counts() -> None:
    plan = planned(GPU)
    one = gpu_use([plan.estimate])
    both = adapter(
        (plan, State.READY), (plan, State.READY), (plan, State.STARTING), (None, State.READY)
    )
    assert both.gpu_use("chat") == GpuUse(one.layers, 2 * one.memory_bytes, one.devices)
    assert both.gpu_use("gone") == GpuUse()


async def test_the_runtime_is_that_of_the_settings() -> None:
    """Seed 002: `GET /corral/v1/runtime` gives RuntimeMetadata."""
    assert await adapter().runtime() == {
        "format": "gguf",
        "runtime_name": "llama.cpp (llama-server)",
        "version": "b10434",
        "supports_gpu": True,
        "supports_streaming": True,
    }


async def test_an_engine_that_is_missing_is_named_without_its_directory() -> None:
    failure = EngineMissing("engine /opt/llama/llama-server not found", hint="set engine")
    with pytest.raises(Unavailable, match=r"^engine llama-server not found; set engine$"):
        await adapter(failure=failure).runtime()
