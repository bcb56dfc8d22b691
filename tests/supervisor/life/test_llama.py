import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.ranch import Ranch, fake_launch

from supervisor.life.launch import Endpoint
from supervisor.life.lifecycle import State
from supervisor.life.llama import EngineSilent, Llama, Refused, read_metrics
from supervisor.life.warm import Warmth, warm


@asynccontextmanager
async def engine(runtime: Path, *faults: str, api_key: str = "k") -> AsyncIterator[Llama]:
    """Run a fake engine and give a client of it."""
    ranch = Ranch(fake_launch(runtime, *faults))
    async with asyncio.timeout(20), ranch.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.WARMING}))
        async with Llama(facts.endpoint, api_key) as llama:
            yield llama


async def test_what_an_engine_says_of_itself_is_typed(runtime: Path) -> None:
    async with engine(runtime) as llama:
        assert await llama.is_healthy()
        assert await llama.is_ours()
        assert await llama.metrics() == {"n_decode_total": 7}


async def test_an_engine_with_another_key_is_not_ours(runtime: Path) -> None:
    async with engine(runtime, api_key="wrong") as llama:
        assert not await llama.is_ours()
        assert await llama.metrics() == Refused(401, "Invalid API Key")


@pytest.mark.parametrize("endpoint", [Endpoint(Path("/nowhere/a.sock")), Endpoint(port=1)])
async def test_an_engine_that_is_not_there_is_silent(endpoint: Endpoint) -> None:
    async with Llama(endpoint, "k") as llama:
        assert not await llama.is_healthy()
        assert not await llama.is_ours()
        assert await warm(llama) is Warmth.SICK
        with pytest.raises(EngineSilent, match="/metrics"):
            await llama.metrics()


@pytest.mark.parametrize(
    ("faults", "warmth"),
    [((), Warmth.WARM), (("no-completion",), Warmth.NOTHING_TO_WARM), (("sick",), Warmth.SICK)],
)
async def test_a_warm_up_ends_in_one_of_three_ways(
    runtime: Path, faults: tuple[str, ...], warmth: Warmth
) -> None:
    async with engine(runtime, *faults) as llama:
        assert await warm(llama) is warmth


def test_metrics_are_read_without_labels_and_without_what_is_none() -> None:
    text = '# TYPE x\nother 1\nllamacpp:a 1\nllamacpp:b 2.5 1700\nllamacpp:c{p="1"} 3\nllamacpp:d'
    assert read_metrics(text) == {"a": 1, "b": 2.5}


@asynccontextmanager
async def saying(runtime: Path, answer: bytes) -> AsyncIterator[Llama]:
    """Give a client of somebody who says the same to everything."""

    async def say(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 500 No\r\nConnection: close\r\nContent-Length: {len(answer)}\r\n\r\n"
        writer.write(head.encode() + answer)
        writer.close()

    path = runtime / "x.sock"
    async with await asyncio.start_unix_server(say, path), Llama(Endpoint(path), "k") as llama:
        yield llama


@pytest.mark.parametrize(("answer", "message"), [(b"<html>", "<html>"), (b'{"error":1}', "")])
async def test_a_refusal_in_a_strange_shape_is_a_refusal(
    runtime: Path, answer: bytes, message: str
) -> None:
    async with saying(runtime, answer) as llama:
        assert await llama.metrics() == Refused(500, message)
