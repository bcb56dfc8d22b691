"""Measuring the real engine, and an engine that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, fake_launch, launch_of

from supervisor.engine.calibration import measure
from supervisor.engine.client import EngineClient, EngineResponse, EngineUnreachable
from supervisor.engine.launch import Launch
from supervisor.engine.states import State


@asynccontextmanager
async def ready(launch: Launch) -> AsyncIterator[EngineClient]:
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.READY}))
        async with EngineClient(facts.endpoint, "k") as client:
            yield client


@pytest.mark.parametrize("slots", [2, 4])
async def test_the_engine_is_measured(
    runtime: Path,
    engine_path: Path,
    engine_library_dirs: tuple[Path, ...],
    tiny_model: Path,
    slots: int,
) -> None:
    words = [engine_path, "--model", tiny_model, "--ctx-size", 4096, "--parallel", slots]
    launch = launch_of(*map(str, words), runtime=runtime, library_dirs=engine_library_dirs)
    async with ready(launch) as client:
        speeds = await measure(client, slots)
    assert speeds
    assert speeds.decode > 0
    assert speeds.prefill
    assert (speeds.together is not None) is (slots == 4)


async def test_an_engine_that_generates_no_text_is_not_measured(runtime: Path) -> None:
    async with ready(fake_launch(runtime, "no-completion")) as client:
        assert await measure(client, 4) is None


class Dying:
    """A client of an engine that dies after so many requests."""

    def __init__(self, client: EngineClient, requests: int) -> None:
        self._client = client
        self._left = requests

    async def post(self, path: str, body: Mapping[str, Any]) -> EngineResponse:
        self._left -= 1
        if self._left < 0:
            raise EngineUnreachable("POST: the connection broke")
        return await self._client.post(path, body)


@pytest.mark.parametrize("requests", [0, 1, 2, 5])
async def test_an_engine_that_dies_meanwhile_is_not_measured(
    runtime: Path,
    engine_path: Path,
    engine_library_dirs: tuple[Path, ...],
    tiny_model: Path,
    requests: int,
) -> None:
    words = [engine_path, "--model", tiny_model, "--ctx-size", 4096, "--parallel", 4]
    launch = launch_of(*map(str, words), runtime=runtime, library_dirs=engine_library_dirs)
    async with ready(launch) as client:
        assert await measure(cast("EngineClient", Dying(client, requests)), 4) is None
