"""Two real engines of unequal speed serve one model."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest
from support import tiny_gguf
from support.proxy_harness import ProxyHarness

from proxy.upstream.upstream import Upstream
from supervisor.builds.probe import library_path

KEY = "inner-key"
OPTIONS = ("--alias", "chat", "-c", "2048", "-np", "2", "-t", "1", "--no-ui")


@pytest.fixture(scope="module")
def sockets(engine_path: Path, engine_library_dirs: tuple[Path, ...]) -> Iterator[dict[str, Path]]:
    """Run one engine with a model of two layers, and one with a model of many."""
    with tempfile.TemporaryDirectory(prefix="corral-") as directory, ExitStack() as stack:
        home = Path(directory)
        tiny_gguf.make(home / "fast.gguf")
        tiny_gguf.make(home / "slow.gguf", embd=256, heads=8, layers=16, ff=1024)
        names = ("fast", "slow")
        for name in names:
            engine = stack.enter_context(
                Popen(
                    [
                        engine_path,
                        "-m",
                        home / f"{name}.gguf",
                        "--host",
                        home / f"{name}.sock",
                        *OPTIONS,
                    ],
                    env={
                        "LLAMA_API_KEY": KEY,
                        "LLAMA_SERVER_ROUTER_PORT": "1",
                        **library_path({}, engine_path, engine_library_dirs),
                    },
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,
                )
            )
            stack.callback(engine.kill)
            assert engine.stdout
            assert any(b'"state":"ready"' in line for line in engine.stdout)
        yield {name: home / f"{name}.sock" for name in names}


async def test_the_faster_engine_gets_more_conversations(
    proxy: ProxyHarness, sockets: dict[str, Path]
) -> None:
    for name, socket in sockets.items():
        proxy.router.admit(Upstream(name, "chat", 2, str(socket), "", 0, KEY))

    async def conversations(count: int) -> Counter[str]:
        names: Counter[str] = Counter()
        for number in range(count):
            message = {"role": "user", "content": f"conversation {count} {number}"}
            async with proxy.ask(messages=[message], max_tokens=60) as response:
                assert response.status == 200
                await response.read()
                names[response.headers["X-Corral-Instance"]] += 1
        return names

    assert await conversations(4) == {"fast": 2, "slow": 2}
    weights = {instance.upstream.name: instance.weight for instance in proxy.router.instances()}
    assert {weight.reason for weight in weights.values()} == {"measured"}
    assert weights["fast"].value > 2 * weights["slow"].value
    later = await conversations(12)
    assert later["fast"] >= 8
    async with proxy.http.get("/corral/v1/slots") as response:
        shown = {
            instance["instance"]: instance for instance in (await response.json())["instances"]
        }
    assert shown["slow"]["weight"] < 1 < shown["fast"]["weight"]
    assert shown["slow"]["weight_reason"] == "measured"
