"""The parts of models on GPUs, as clients see them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, model_info

from proxy.errors import Unavailable
from proxy.request.models import GpuUse
from proxy.settings import BatchSettings

ON_GPU = GpuUse(layers=31, memory_bytes=2_500_000_000, devices=("Vulkan0",))


async def warmed(proxy: ProxyHarness, **sent: Any) -> tuple[int, dict[str, Any]]:
    async with proxy.http.post("/v1/gpu/warmup", **sent) as response:
        return response.status, await response.json()


async def status(proxy: ProxyHarness) -> dict[str, Any]:
    async with proxy.http.get("/v1/gpu/status") as response:
        found: dict[str, Any] = await response.json()
        return found


async def test_a_warm_up_loads_the_model_and_reports_its_layers_on_gpus(
    proxy: ProxyHarness,
) -> None:
    """Seed 003: GpuWarmupResponse."""
    proxy.engine.uses["chat"] = ON_GPU
    assert await warmed(proxy) == (
        200,
        {
            "success": True,
            "memory_bytes": 2_500_000_000,
            "num_layers": 31,
            "message": "chat is loaded: 31 layers on Vulkan0, 2.50 GB",
        },
    )
    assert proxy.loader.began.is_set()


async def test_without_a_gpu_it_says_so(proxy: ProxyHarness) -> None:
    """Seed 003: GpuWarmupResponse where no GPU is used."""
    _, answer = await warmed(proxy)
    assert answer == {
        "success": False,
        "memory_bytes": 0,
        "num_layers": 0,
        "message": "chat is loaded and runs on the CPU: no layer of it is on a GPU",
    }
    assert proxy.loader.began.is_set()


async def test_the_status_of_models_on_gpus(proxy: ProxyHarness) -> None:
    """Seed 003: GpuStatusResponse."""
    proxy.loader.model_infos = [model_info("chat"), model_info("code"), model_info("small")]
    proxy.engine.uses = {"chat": ON_GPU, "code": replace(ON_GPU, memory_bytes=1)}
    assert await status(proxy) == {
        "cache_ready": True,
        "cache_memory_bytes": 2_500_000_001,
        "batch_threshold": 32,
        "recommended_min_batch": 4,
    }


async def test_the_status_has_the_sizes_of_batches_as_set(proxy: ProxyHarness) -> None:
    """Seed 003: BatchConfig gpu_threshold and min_batch."""
    await proxy.open(batch=BatchSettings(preset="low_latency", gpu_threshold=9))
    found = await status(proxy)
    assert (found["batch_threshold"], found["recommended_min_batch"]) == (9, 2)


async def test_the_status_without_a_gpu(proxy: ProxyHarness) -> None:
    """Seed 003: GpuStatusResponse where nothing is on a GPU."""
    found = await status(proxy)
    assert (found["cache_ready"], found["cache_memory_bytes"]) == (False, 0)
    assert not proxy.loader.began.is_set()


@pytest.mark.parametrize(
    "sent",
    [{"json": {"model": "code"}}, {"json": {"model_id": "code"}}, {"params": {"model": "code"}}],
    ids=str,
)
async def test_a_model_can_be_named(proxy: ProxyHarness, sent: dict[str, Any]) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("code")]
    assert (await warmed(proxy, **sent))[1]["message"].startswith("code is loaded")


async def test_a_model_must_be_named_among_several(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("code")]
    code, answer = await warmed(proxy)
    assert (code, answer["error"]["code"]) == (400, "invalid_request")


async def test_a_model_that_cannot_be_loaded_is_an_error(proxy: ProxyHarness) -> None:
    proxy.loader.failure = Unavailable("chat is unavailable: no memory")
    code, answer = await warmed(proxy)
    assert (code, answer["error"]["message"]) == (503, "chat is unavailable: no memory")


async def test_a_load_may_take_as_long_as_a_request_may_wait(proxy: ProxyHarness) -> None:
    await proxy.open(queue_timeout_s=0.01)
    proxy.loader.may_go_on.clear()
    code, answer = await warmed(proxy)
    assert (code, answer["error"]["code"]) == (503, "queue_timeout")


async def test_models_of_other_machines_are_not_warmed(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [replace(model_info("chat"), is_local=False)]
    assert (await warmed(proxy, json={"model": "chat"}))[0] == 404


async def test_a_key_sees_only_its_models(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text('[keys.me]\nkey = "corral-me-1234"\nmodels = ["other"]\n')
    proxy.engine.uses["chat"] = ON_GPU
    await proxy.open(api_keys_file=path)
    mine = {"Authorization": "Bearer corral-me-1234"}
    assert (await warmed(proxy, json={"model": "chat"}))[0] == 401
    assert (await warmed(proxy, json={"model": "chat"}, headers=mine))[0] == 404
    async with proxy.http.get("/v1/gpu/status", headers=mine) as response:
        assert (await response.json())["cache_ready"] is False
    assert not proxy.loader.began.is_set()


async def test_the_runtime_is_told(proxy: ProxyHarness) -> None:
    """Seed 002: `GET /corral/v1/runtime`."""
    async with proxy.http.get("/corral/v1/runtime") as response:
        assert await response.json() == {"format": "gguf", "version": "fake"}
