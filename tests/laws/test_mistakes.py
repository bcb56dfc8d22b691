"""A client's mistake is never answered with 500 or more, which its library would retry.

One of eleven requests is tried; all of them with `MISTAKES=all` in the environment.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from laws.mistakes import requests
from support import engine as engines
from support.proxy_harness import ProxyHarness

from supervisor.builds.discover import Engine

STEP: Final = 1 if os.environ.get("MISTAKES") == "all" else 11
# A page that a model of the sort does not serve is a mistake as well.
SORTS: Final[dict[str, list[str]]] = {
    "writes": ["--jinja"],
    "embeds": ["--embeddings", "--pooling", "mean"],
    "ranks": ["--reranking"],
}


@pytest.fixture(scope="module", params=SORTS)
def socket(engine: Engine, tiny_model: Path, request: Any) -> Iterator[Path]:
    options = ["-c", "512", "-np", "2", "-t", "1", *SORTS[request.param]]
    with engines.running(engine, tiny_model, *options) as socket:
        yield socket


@pytest.fixture
async def proxy(socket: Path) -> AsyncIterator[ProxyHarness]:
    async with engines.proxied(socket, 2) as proxy:
        yield proxy


@pytest.mark.timeout(600)
async def test_no_mistake_of_a_client_is_a_fault_of_ours(proxy: ProxyHarness) -> None:
    faults = []
    for path, body in list(requests())[::STEP]:
        async with proxy.http.post(path, json={"model": "chat", **body}) as response:
            said = await response.read()
            if response.status >= 500:
                faults.append((response.status, path, body, said))
            elif response.status >= 400:
                assert has_the_shape_of(path, await response.json()), (path, body, said)
    assert not faults


def has_the_shape_of(path: str, said: dict[str, Any]) -> bool:
    """Return whether the client library of an API understands an error."""
    error = said["error"]
    if path.startswith("/v1/messages"):
        return said.keys() == {"type", "error"} and {"type", "message"} <= error.keys()
    is_openais = path.startswith("/v1/")
    return "message" in error and (not is_openais or {"param", "code", "type"} <= error.keys())
