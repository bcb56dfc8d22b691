"""A lease for work of our own, which gives way to clients.

A prompt is prefilled with a lease, as for a client: no request waits inside the engine, and what is
known of its slots stays true. It waits behind every client and ends when one needs the instance: an
engine with two prompts computes the second after the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.errors import UpstreamShutDown
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from proxy.router.router import Router

_PATIENCE_S: Final = 5.0

IsPreempted = Callable[[], bool]


@asynccontextmanager
async def background_lease(router: Router, name: str) -> AsyncIterator[IsPreempted]:
    """Hold a slot of one instance; the block gets a function that returns whether to leave.

    Raises:
        UpstreamShutDown: It is not in service, or was stopped.
        ProxyError: No slot was free in five seconds.
    """
    instances = {instance.upstream.name: instance.upstream for instance in router.instances()}
    ours = instances.pop(name, None)
    if ours is None:
        raise UpstreamShutDown(name)
    async with router.lease(_request(ours), instances) as lease:
        if lease.upstream.name != name:
            router.finish(lease)
            raise UpstreamShutDown(name)
        yield lambda: _is_wanted(router, lease)
        router.finish(lease)


def _is_wanted(router: Router, lease: Lease) -> bool:
    name, model = lease.upstream.name, lease.upstream.model
    waiting = router.demand(model).waiting
    return waiting > 0 or router.in_flight(name) > 1 or not lease.instance.in_service


def _request(upstream: Upstream) -> ProxyRequest:
    """Return a request that, like a forwarded one, stays here and loads nothing."""
    return ProxyRequest(
        request_id=f"warm-{upstream.name}",
        method="POST",
        path="/v1/chat/completions",
        query="",
        headers=CIMultiDict(),
        body=b"",
        json={},
        kind=EndpointKind.CHAT,
        model=upstream.model,
        client="",
        priority="batch",
        queue_timeout_s=_PATIENCE_S,
        is_from_proxy=True,
        is_background=True,
    )
