"""Nodes whose HTTP is a call: the product's own monitors poll them, and read their digests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import orjson

from proxy.auth.access import PREFIXES
from proxy.cache.remote_prefixes import PrefixDigests
from proxy.nodes.configured import ConfiguredNode, NodeTimes
from proxy.nodes.monitor import NodeMonitors
from proxy.nodes.settings import NodeSettings
from proxy.observe.record import discard
from proxy.request.models import ModelNames
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, UpstreamRequest
from scripts.simulation.workload import MODEL

# Polls of the models are not measured.
_TIMES = NodeTimes(poll_s=3600.0)


@dataclass(slots=True)
class DigestCosts:
    """The cost of all reads of digests of a front, without HTTP."""

    reads: int = 0
    read_bytes: int = 0
    written_ns: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedNode(ConfiguredNode):
    """A llama-corral; `digests` is None if it reports none."""

    slots: int = 0
    digests: PrefixDigests | None = field(default=None, compare=False)
    costs: DigestCosts = field(default_factory=DigestCosts, compare=False)

    async def fetch(
        self, request: UpstreamRequest, settings: ProxySettings, limit_s: float, max_bytes: int
    ) -> FetchedBody:
        del settings, limit_s, max_bytes
        if request.path != PREFIXES:
            entry = {"id": MODEL, "meta": {"slots": self.slots}}
            return FetchedBody(200, orjson.dumps({"data": [entry]}))
        if self.digests is None:
            return FetchedBody(404, b"")
        began_ns = time.thread_time_ns()
        cursor = parse_qs(request.query).get("after", [""])[0]
        digest = self.digests.after(cursor, None, [MODEL])
        body = digest.to_bytes() if digest else b""
        self.costs.reads += 1
        self.costs.read_bytes += len(body)
        self.costs.written_ns += time.thread_time_ns() - began_ns
        return FetchedBody(200 if digest else 204, body)


def monitors_of(router: Router, settings: ProxySettings) -> NodeMonitors:
    """Return the monitors of a front that runs no models."""
    no_models = ModelNames(())
    return NodeMonitors(router, lambda: no_models, settings, discard, _do_nothing, _TIMES)


def node_settings(number: int) -> NodeSettings:
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return NodeSettings(url=f"http://{address}:8080", local_first=False)


def _do_nothing() -> None:
    pass
