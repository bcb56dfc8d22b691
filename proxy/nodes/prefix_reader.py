"""Reads which prefixes a node holds, so that a turn goes to the machine that has its cache.

Another llama-corral tells them in digests; of a server without that endpoint nothing is believed. A
node that had something new in the last half minute is asked twice a second, another one every 5 s,
and all nodes together at most a hundred times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlencode

from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.headers import HOP
from proxy.nodes.configured import ConfiguredNode
from proxy.prompt_cache.prefix_digest import (
    DIGEST_MAX_BYTES,
    PREFIXES,
    Digest,
    UnreadableDigest,
    read_digest,
)
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, fetch, get_request
from proxy.upstream.upstream import Upstream

_PAUSE_MIN_S: Final = 0.5
_PAUSE_MAX_S: Final = 5.0
# So many reads without anything new, and a node is idle.
_IDLE_READS: Final = 60
# It has no digests; after a restart it may.
_PAUSE_WITHOUT_S: Final = 60.0
_READS_PER_S: Final = 100
_TIMEOUT_S: Final = 5.0
# Requests may wait for the models of a node that is new.
_FIRST_TIMEOUT_S: Final = 1.0


def pause_s(unchanged: int, nodes: int) -> float:
    """Return the time until the next read, after so many reads without anything new."""
    wait_s = _PAUSE_MIN_S if unchanged < _IDLE_READS else _PAUSE_MAX_S
    return max(wait_s, nodes / _READS_PER_S)


class PrefixReader:
    """Reads the digests of one node.

    Args:
        upstreams: Its admitted models, by instance name.
        nodes: How many nodes there are.
    """

    def __init__(
        self,
        node: ConfiguredNode,
        router: Router,
        settings: ProxySettings,
        upstreams: Callable[[], Mapping[str, Upstream]],
        nodes: Callable[[], int],
    ) -> None:
        self._node = node
        self._router = router
        self._settings = settings
        self._upstreams = upstreams
        self._nodes = nodes
        self._cursor = ""
        self._known: Mapping[str, Upstream] = {}
        self._unchanged = 0

    async def serve(self) -> None:
        """Read until cancelled."""
        try:
            while True:
                has_digests = await self._read() if self._follow() else True
                wait_s = pause_s(self._unchanged, self._nodes())
                await asyncio.sleep(wait_s if has_digests else _PAUSE_WITHOUT_S)
        finally:
            self._forget()

    async def read_first(self, upstreams: Mapping[str, Upstream]) -> None:
        """Take what models hold that are about to be admitted, if it is told within a second."""
        with suppress(UpstreamFailed, UpstreamTimeout, UnreadableDigest):
            response = await self._fetch("", _FIRST_TIMEOUT_S)
            if response.status == 200:
                self._known = upstreams
                self._take(read_digest(response.body))

    async def _read(self) -> bool:
        """Take what is new; return False if the node has no digests."""
        self._unchanged += 1
        try:
            response = await self._fetch(self._cursor, _TIMEOUT_S)
            if response.status == 200:
                self._take(read_digest(response.body))
        except (UpstreamFailed, UpstreamTimeout):
            return True
        except UnreadableDigest:
            return False
        return response.status in {200, 204}

    async def _fetch(self, cursor: str, limit_s: float) -> FetchedBody:
        request = get_request(PREFIXES, urlencode({"after": cursor}), **{HOP: "1"})
        upstream = self._node.upstream(self._node.name, "", "", 1)
        return await fetch(upstream, request, self._settings, limit_s, DIGEST_MAX_BYTES)

    # No method below awaits.

    def _follow(self) -> bool:
        """Begin anew where the node's models have changed; return whether there are any."""
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
                self._router.add_remote_prefixes(upstream, hashes)

    def _forget(self) -> None:
        self._cursor = ""
        for name in self._known:
            self._router.forget_remote_prefixes(name)
