"""The answer to a request of any form is the engine's own.

Whole answers are compared field by field, streams event by event. What differs between two answers
to the same request is left out: names, times, and how much the cache held. `SHAPES` in the
environment sets how many shapes are tried, other ones each time; see `scripts/shapes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from laws.mended import asked, mended
from laws.request_shapes import KNOWN, SHAPES, Shape
from laws.test_assemble import TEMPLATE
from support import engine as engines
from support.proxy_harness import ProxyHarness

from supervisor.builds.discover import Engine

ASKED: Final = os.environ.get("SHAPES")
BOUNDS: Final = settings(
    max_examples=int(ASKED or 40),
    derandomize=ASKED is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
PASSING: Final = {
    *("id", "created", "created_at", "completed_at", "call_id", "item_id", "id_slot"),
    *("cached_tokens", "cache_read_input_tokens", "input_tokens", "tokens_cached"),
    *("cache_n", "prompt_n", "timings/prompt_n"),
}
MADE_UP: Final = re.compile(r"(chatcmpl|resp|msg|rs|fc|toolu)[-_][A-Za-z0-9]+")
# As some templates of models that think: they begin the thought.
THOUGHTFUL: Final = TEMPLATE.replace("{{ '<think>\\n' }}", "{{ '<think>\\nOkay, ' }}")


class Pair:
    """One engine, asked through the proxy and without it."""

    def __init__(self, runner: asyncio.Runner, stack: AsyncExitStack, socket: Path) -> None:
        self._runner = runner
        self._stack = stack
        self._socket = socket
        runner.run(self._open())

    def answers(self, path: str, body: dict[str, Any]) -> list[tuple[int, Any]]:
        """Return the status and the content of both answers, the engine's own first."""
        return self._runner.run(self._answers(path, body))

    async def _open(self) -> None:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-"))
        proxy = ProxyHarness(Path(directory), self._stack)
        await proxy.open()
        proxy.router.admit(engines.upstream(self._socket, 2))
        direct = aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(self._socket), force_close=True),
            headers={"Authorization": f"Bearer {engines.KEY}"},
        )
        self._clients = (await self._stack.enter_async_context(direct), proxy.http)

    async def _answers(self, path: str, body: dict[str, Any]) -> list[tuple[int, Any]]:
        said = []
        for client in self._clients:
            is_direct = client is self._clients[0]
            sent = asked(path, body) if is_direct else body
            async with client.post(path, json=sent) as response:
                content = await response.read()
                if is_direct:
                    content = mended(path, body, response.status, content)
                is_stream = response.content_type == "text/event-stream"
                found = events(content) if is_stream else without_passing(json.loads(content))
                said.append((response.status, found))
        return said


@contextmanager
def paired(engine: Engine, model: Path, *options: str) -> Iterator[Pair]:
    shape = ("-c", "2048", "-np", "2", "-t", "1", "--no-kv-unified")
    with (
        engines.running(engine, model, *shape, "--slot-prompt-similarity", "0", *options) as socket,
        asyncio.Runner() as runner,
    ):
        stack = AsyncExitStack()
        try:
            yield Pair(runner, stack, socket)
        finally:
            runner.run(stack.aclose())


@pytest.fixture(scope="module")
def plain(engine: Engine, tiny_model: Path) -> Iterator[Pair]:
    """Return an engine whose model writes at random, as long as it may."""
    with paired(engine, tiny_model) as pair:
        yield pair


@pytest.fixture(scope="module", params=[TEMPLATE, THOUGHTFUL], ids=["thinks", "began to think"])
def thinking(
    engine: Engine, smollm2: Path, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Iterator[Pair]:
    """Return an engine whose template knows tools and thoughts."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(request.param, "utf-8")
    with paired(engine, smollm2, "--jinja", "--chat-template-file", str(template)) as pair:
        yield pair


@BOUNDS
@given(shape=SHAPES)
def test_every_page_answers_as_the_engine_does(plain: Pair, shape: Shape) -> None:
    compare(plain, shape)


@settings(BOUNDS, max_examples=BOUNDS.max_examples // 4)
@given(shape=SHAPES)
def test_thoughts_and_tools_come_as_the_engine_sends_them(thinking: Pair, shape: Shape) -> None:
    compare(thinking, shape)


@pytest.mark.parametrize("shape", KNOWN)
def test_what_was_once_answered_differently(thinking: Pair, shape: Shape) -> None:
    compare(thinking, shape)


def compare(pair: Pair, shape: Shape) -> None:
    path, members = shape
    for stream in (False, True):
        body = {"model": "chat", "temperature": 0, "cache_prompt": False, **members}
        (own_status, own), (status, ours) = pair.answers(path, {**body, "stream": stream})
        if may_call_despite_format(members):
            # The engine calls no tool then: tests/clients/test_tools_and_format.py.
            assert (status >= 400) == (own_status >= 400)
        elif own_status >= 400:
            assert status >= 400
            assert ours["error"]["message"] == own["error"]["message"]
        elif stream and is_several(members) and has_failed(own):
            assert has_failed(ours)  # how far the others came is chance
        elif stream and is_several(members):
            assert sorted(map(repr, ours)) == sorted(map(repr, own))
        else:
            stops = stops_of(members)
            assert (status, cut(ours, stops)) == (own_status, cut(own, stops))


def may_call_despite_format(members: dict[str, Any]) -> bool:
    formats = {"response_format", "json_schema", "text", "output_config"}
    return (
        bool(members.get("tools"))
        and members.get("tool_choice") != "none"
        and not formats.isdisjoint(members)
    )


def has_failed(events: list[tuple[str, Any]]) -> bool:
    return any("error" in said for _, said in events if isinstance(said, dict))


def stops_of(members: dict[str, Any]) -> list[str]:
    given = members.get("stop", members.get("stop_sequences", []))
    return given if isinstance(given, list) else [given]


def cut(part: Any, stops: list[str]) -> Any:
    """Return a part of an answer, its texts without an end that may grow.

    That is half a letter, or the beginning of a stop string. Where an answer ends at its limit, the
    engine shows it in a whole answer and not in a stream: the one difference that is left.
    """
    match part:
        case str():
            begun = [stop[:n] for stop in stops for n in range(1, len(stop))]
            whole = part.rstrip("\ufffd")
            found = [entry for entry in begun if whole.endswith(entry)]
            return whole.removesuffix(max(found, key=len, default=""))
        case list() | tuple():
            return [cut(entry, stops) for entry in part]
        case dict():
            return {name: cut(entry, stops) for name, entry in part.items()}
    return part


def is_several(members: dict[str, Any]) -> bool:
    """Return whether several answers come at once, whose events mix as it happens."""
    several = members.get("n", 1) > 1 or members.get("n_cmpl", 1) > 1
    return several or isinstance(members.get("prompt"), list)


def events(stream: bytes) -> list[tuple[str, Any]]:
    """Return the name and the content of each event; comments, pings and null tell nothing."""
    events = []
    for event in stream.split(b"\n\n"):
        fields = [line.partition(b":") for line in event.splitlines()]
        name = b"".join(value for field, _, value in fields if field == b"event").decode()
        data = b"".join(value for field, _, value in fields if field == b"data").decode()
        if data.strip() not in {"", "null"} and name.strip() != "ping":
            events.append((name, data if "[DONE]" in data else without_passing(json.loads(data))))
    return events


def without_passing(part: Any) -> Any:
    """Return a part of an answer without members that vary, of `timings` its names alone."""
    match part:
        case str():
            return MADE_UP.sub("", part)
        case list():
            return [without_passing(entry) for entry in part]
        case dict():
            return {name: without_passing(entry) for name, entry in kept(part).items()}
    return part


def kept(part: dict[str, Any]) -> dict[str, Any]:
    events = {
        name: None if name in PASSING or name.endswith("_ms") else part[name] for name in part
    }
    return {**events, "timings": sorted(part["timings"])} if "timings" in part else events
