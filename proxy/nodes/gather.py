"""Asks all nodes one question at a time, and gives the reason for each missing answer.

The nodes are asked together, within `NodeTimes.ask_s` in all. A node that is down is not asked: its
monitor knows why. Answers come from other machines: here only their size is checked, and that they
are objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlencode

import orjson

from proxy.auth.access import MACHINE
from proxy.common.headers import HOP
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.nodes.monitor import NodeMonitor
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, get_request

Question = Literal["machine", "caches", "requests", "usage"]
PATHS: Final[Mapping[Question, str]] = {
    "machine": MACHINE,
    "caches": f"{MACHINE}/caches",
    "requests": "/corral/v1/requests",
    "usage": "/corral/v1/usage",
}
_TOGETHER_MAX: Final = 128
_MAX_BYTES: Final = 4 * 1024**2
_REFUSALS: Final[Mapping[int, str]] = {
    401: "it needs an API key: set key_file under [nodes.NAME]",
    403: "the key that it is asked with is not an admin's there",
    404: "it is no llama-corral, or an older one",
}


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The answer of a node, or the `problem` that kept it from answering, as a clause."""

    node: str
    answer: Mapping[str, Any] | None = None
    problem: str | None = None


async def ask_all(
    monitors: Iterable[NodeMonitor],
    settings: ProxySettings,
    question: Question,
    query: Mapping[str, str],
    timeout_s: float,
) -> list[NodeAnswer]:
    """Return an answer of each node in this order."""
    room = asyncio.Semaphore(_TOGETHER_MAX)
    request = get_request(PATHS[question], urlencode(query), **{HOP: "1"})

    async def ask(monitor: NodeMonitor) -> NodeAnswer:
        name = monitor.node.name
        if monitor.state == "down":
            return NodeAnswer(name, problem=monitor.problem)
        try:
            async with asyncio.timeout_at(ends_at_s), room:
                found = await monitor.node.fetch(request, settings, timeout_s, _MAX_BYTES)
        except (TimeoutError, UpstreamTimeout):
            return NodeAnswer(name, problem=f"no answer in {timeout_s:g} s")
        except UpstreamFailed as error:
            return NodeAnswer(name, problem=error.message.removeprefix(f"{name} "))
        return _read(name, found)

    ends_at_s = asyncio.get_running_loop().time() + timeout_s
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(monitor)) for monitor in monitors]
    return [task.result() for task in tasks]


def _read(name: str, found: FetchedBody) -> NodeAnswer:
    if found.status != 200:
        reason = _REFUSALS.get(found.status, f"it answered with status {found.status}")
        return NodeAnswer(name, problem=reason)
    try:
        answer = orjson.loads(found.body)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return NodeAnswer(name, answer)
    return NodeAnswer(name, problem="its answer is not that of a llama-corral")
