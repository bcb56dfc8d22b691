"""The real engine on a unix socket, for a test that needs nothing of the supervisor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from support.proxy_harness import ProxyHarness

from proxy.upstream.upstream import Upstream
from supervisor.builds.discover import Engine
from supervisor.engine.launch import ROUTER_ENV

KEY = "inner-key"


@contextmanager
def running(engine: Engine, model: Path, *options: str) -> Iterator[Path]:
    """Run it until the block ends; yield its socket once the model is loaded."""
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        socket = Path(directory, "engine.sock")
        shape = ("-m", str(model), "--host", str(socket), "--alias", "chat", "--no-ui")
        with loading(engine, [str(engine.path), *shape, *options]) as is_loaded:
            assert is_loaded
            yield socket


@contextmanager
def loading(engine: Engine, argv: Sequence[str]) -> Iterator[bool]:
    """Run a command line until the block ends; yield whether it loads its model."""
    env = {
        "LLAMA_API_KEY": KEY,
        ROUTER_ENV: "1",
        "OMP_WAIT_POLICY": "passive",
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, engine.library_dirs)),
    }
    with Popen(argv, env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdout
        try:
            yield any(b'"state":"ready"' in line for line in process.stdout)
        finally:
            process.kill()


@asynccontextmanager
async def proxied(socket: Path, slots: int, **settings: object) -> AsyncIterator[ProxyHarness]:
    """Run a proxy in front of it for the length of the block; `settings` are changes."""
    async with AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="corral-") as directory:
            proxy = ProxyHarness(Path(directory), stack)
            await proxy.open(**settings)
            proxy.router.admit(upstream(socket, slots))
            yield proxy


def upstream(socket: Path, slots: int) -> Upstream:
    """Return the facts of it that the proxy needs."""
    return Upstream("chat.1", "chat", slots, str(socket), "", 0, KEY)
