"""Reads what one node offers, and whether it stops or is known already."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from proxy.headers import DRAINING, HOP, PROCESS
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.model_list import RemoteModel, Unreadable, count_slots, read_remote_models
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, fetch, get_request

_TIMEOUT_S: Final = 5.0
_LARGE_BYTES: Final = 64 * 1024
_MAX_BYTES: Final = 2 * 1024**2
_PROCESS_MAX_CHARACTERS: Final = 64


class NodeDraining(Exception):
    """The node stops: it answers what it has, and takes no more."""


@dataclass(frozen=True, slots=True)
class Polled:
    """`process`: the node's process, if it is a llama-corral; else empty."""

    remote_models: tuple[RemoteModel, ...]
    process: str


class NodePoller:
    def __init__(self, node: ConfiguredNode, settings: ProxySettings) -> None:
        self._node = node
        self._settings = settings
        self._slots: dict[str, int] = {}

    async def poll(self) -> Polled:
        """Read its loaded models, and those that it would load.

        Raises:
            NodeDraining: It stops.
            UpstreamFailed, UpstreamTimeout, Unreadable: It does not answer as a node does.
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
        return Polled(remote_models, process)

    async def _read_slots(self, remote_models: Sequence[RemoteModel]) -> None:
        """Count the slots of new models that do not report them."""
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
        upstream = self._node.upstream(self._node.name, "", "", 1)
        return await fetch(upstream, request, self._settings, _TIMEOUT_S, _MAX_BYTES)

    def slots_of(self, remote_model: RemoteModel) -> int:
        return remote_model.slots or self._slots.get(remote_model.id, self._node.settings.slots)

    def forget_slots(self) -> None:
        self._slots.clear()
