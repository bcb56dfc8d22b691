"""Reads a node's reports: its process, its models, and the prefixes in its caches.

No machine counts twice, and none counts itself. Prefixes are read so that a turn goes to the
machine that has its cache. A llama-corral reports them in digests; other servers have no such
endpoint. A node with news in the last 30 s is asked twice a second, others every 5 s, and all nodes
together at most a hundred times a second.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlencode

from proxy.auth.access import PREFIXES
from proxy.cache.remote_prefixes import DIGEST_MAX_BYTES, Digest, UnreadableDigest, read_digest
from proxy.common.headers import DRAINING, HOP, PROCESS
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.nodes.configured import NODE_TIMES, ConfiguredNode, NodeTimes
from proxy.nodes.model_list import RemoteModel, Unreadable, count_slots, read_remote_models
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, get_request
from proxy.upstream.upstream import Upstream

_TIMEOUT_S: Final = 5.0
_LARGE_BYTES: Final = 64 * 1024
_MAX_BYTES: Final = 2 * 1024**2
_PROCESS_MAX_CHARACTERS: Final = 64


class NodeDraining(Exception):
    """The node is stopping: it finishes its requests, and accepts no more."""


class NodePoller:
    def __init__(self, node: ConfiguredNode, settings: ProxySettings) -> None:
        self._node = node
        self._settings = settings
        self._slots: dict[str, int] = {}

    async def poll(self) -> tuple[tuple[RemoteModel, ...], str]:
        """Read its loaded models, and those that it would load; also returns its process.

        The process is empty if the node is not a llama-corral.

        Raises:
            NodeDraining: It is stopping.
            UpstreamFailed, UpstreamTimeout, Unreadable: Its answer is not that of a node.
        """
        answer = await self._fetch("/v1/models")
        if DRAINING in answer.headers:
            raise NodeDraining
        if answer.status != 200:
            raise Unreadable(f"it answers {answer.status} to /v1/models, and lists no models there")
        settings = self._node.settings
        with_loadable = settings.load == "idle"
        read = functools.partial(
            read_remote_models, answer.body, settings.models, with_loadable=with_loadable
        )
        is_large = len(answer.body) > _LARGE_BYTES
        remote_models = await asyncio.to_thread(read) if is_large else read()
        await self._read_slots(remote_models)
        process = answer.headers.get(PROCESS, "")[:_PROCESS_MAX_CHARACTERS]
        return remote_models, process

    async def _read_slots(self, remote_models: Sequence[RemoteModel]) -> None:
        for remote_model in remote_models:
            is_new = remote_model.id not in self._slots
            if remote_model.is_loaded and remote_model.slots is None and is_new:
                # Without autoload=false, a llama-server in router mode would load the model.
                query = urlencode({"model": remote_model.id, "autoload": "false"})
                answer = await self._fetch("/slots", query)
                if answer.status != 200:
                    return  # the endpoint is missing for all models
                slots = count_slots(answer.body) or self._node.settings.slots
                self._slots[remote_model.id] = slots

    async def _fetch(self, path: str, query: str = "") -> FetchedBody:
        request = get_request(path, query, **{HOP: "1", "Accept": "application/json"})
        return await self._node.fetch(request, self._settings, _TIMEOUT_S, _MAX_BYTES)

    def slots_of(self, remote_model: RemoteModel) -> int:
        return remote_model.slots or self._slots.get(remote_model.id, self._node.settings.slots)

    def forget_slots(self) -> None:
        self._slots.clear()


# A node is idle after this many reads without news.
_IDLE_READS: Final = 60
# The node has no digests; after a restart it may have.
_PAUSE_WITHOUT_S: Final = 60.0
_READS_PER_S: Final = 100
_PREFIXES_TIMEOUT_S: Final = 5.0
# Requests may wait for the models of a node that is new.
_FIRST_PREFIXES_TIMEOUT_S: Final = 1.0


def prefixes_pause_s(unchanged: int, nodes: int, times: NodeTimes = NODE_TIMES) -> float:
    """Return the time until the next read, after `unchanged` reads without news."""
    wait_s = times.digest_s if unchanged < _IDLE_READS else times.idle_digest_s
    return max(wait_s, nodes / _READS_PER_S)


class PrefixReader:
    """Reads the digests of one node.

    Args:
        upstreams: Returns its admitted models, by instance name.
        nodes: Returns the number of nodes.
    """

    def __init__(
        self,
        node: ConfiguredNode,
        router: Router,
        settings: ProxySettings,
        upstreams: Callable[[], Mapping[str, Upstream]],
        nodes: Callable[[], int],
        times: NodeTimes = NODE_TIMES,
    ) -> None:
        self._node = node
        self._router = router
        self._settings = settings
        self._upstreams = upstreams
        self._nodes = nodes
        self._times = times
        self._cursor = ""
        self._known: Mapping[str, Upstream] = {}
        self._unchanged = 0

    async def serve(self) -> None:
        try:
            while True:
                has_digests = await self._read() if self._follow() else True
                wait_s = prefixes_pause_s(self._unchanged, self._nodes(), self._times)
                await asyncio.sleep(wait_s if has_digests else _PAUSE_WITHOUT_S)
        finally:
            self._forget()

    async def read_first(self, upstreams: Mapping[str, Upstream]) -> None:
        """Read the prefixes of models before their admission, if the node answers within 1 s."""
        with suppress(UpstreamFailed, UpstreamTimeout, UnreadableDigest):
            response = await self._fetch("", _FIRST_PREFIXES_TIMEOUT_S)
            if response.status == 200:
                self._known = upstreams
                self._take(read_digest(response.body))

    async def _read(self) -> bool:
        """Read the news; return False if the node has no digests."""
        self._unchanged += 1
        try:
            response = await self._fetch(self._cursor, _PREFIXES_TIMEOUT_S)
            if response.status == 200:
                self._take(read_digest(response.body))
        except (UpstreamFailed, UpstreamTimeout):
            return True
        except UnreadableDigest:
            return False
        return response.status in {200, 204}

    async def _fetch(self, cursor: str, limit_s: float) -> FetchedBody:
        request = get_request(PREFIXES, urlencode({"after": cursor}), **{HOP: "1"})
        return await self._node.fetch(request, self._settings, limit_s, DIGEST_MAX_BYTES)

    # No method below awaits.

    def _follow(self) -> bool:
        """Start over if the node's models have changed; return whether there are any."""
        upstreams = self._upstreams()
        if upstreams.keys() != self._known.keys():
            self._forget()
        self._known = dict(upstreams)
        return bool(upstreams)

    def _take(self, digest: Digest) -> None:
        if digest.is_whole:
            self._forget()
        self._unchanged, self._cursor = 0, digest.cursor
        for upstream in self._known.values():
            if upstream.node and (hashes := digest.hashes.get(upstream.node.model)):
                self._router.cache.add_remote(upstream, hashes)

    def _forget(self) -> None:
        self._cursor = ""
        for name in self._known:
            self._router.cache.remote.forget(name)
