import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, fake_launch

from supervisor.engine.client import Endpoint, EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.states import State
from supervisor.engine.warmup import Warmup, warm


@asynccontextmanager
async def engine(runtime: Path, *failures: str, api_key: str = "k") -> AsyncIterator[EngineClient]:
    """Run a fake engine, and connect a client."""
    harness = InstanceHarness(fake_launch(runtime, *failures))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.WARMING}))
        async with EngineClient(facts.endpoint, api_key) as client:
            yield client


async def test_health_identity_and_metrics_are_parsed(runtime: Path) -> None:
    async with engine(runtime) as client:
        assert await client.is_healthy()
        assert await client.is_ours()
        assert await client.read_metrics() == {"n_decode_total": 7}


async def test_an_engine_with_another_key_is_not_ours(runtime: Path) -> None:
    async with engine(runtime, api_key="wrong") as client:
        assert not await client.is_ours()
        assert await client.read_metrics() == ErrorResponse(401, "Invalid API Key")


@pytest.mark.parametrize("endpoint", [Endpoint(Path("/nowhere/a.sock")), Endpoint(port=1)])
async def test_an_unreachable_engine_is_unhealthy(endpoint: Endpoint) -> None:
    async with EngineClient(endpoint, "k") as client:
        assert not await client.is_healthy()
        assert not await client.is_ours()
        assert await warm(client) == "failed"
        with pytest.raises(EngineUnreachable, match="/metrics"):
            await client.read_metrics()


@pytest.mark.parametrize(
    ("failures", "warmth"),
    [((), "warm"), (("no-completion",), "nothing to warm"), (("sick",), "failed")],
)
async def test_a_warm_up_has_three_results(
    runtime: Path, failures: tuple[str, ...], warmth: Warmup
) -> None:
    async with engine(runtime, *failures) as client:
        assert await warm(client) == warmth


@asynccontextmanager
async def answering(runtime: Path, answer: bytes) -> AsyncIterator[EngineClient]:
    """Connect a client to a server that gives one answer to everything."""

    async def say(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 500 No\r\nConnection: close\r\nContent-Length: {len(answer)}\r\n\r\n"
        writer.write(head.encode() + answer)
        writer.close()

    path = runtime / "x.sock"
    async with (
        await asyncio.start_unix_server(say, path),
        EngineClient(Endpoint(path), "k") as client,
    ):
        yield client


@pytest.mark.parametrize(("answer", "message"), [(b"<html>", "<html>"), (b'{"error":1}', "")])
async def test_an_error_of_another_shape_is_an_error(
    runtime: Path, answer: bytes, message: str
) -> None:
    async with answering(runtime, answer) as client:
        assert await client.read_metrics() == ErrorResponse(500, message)
