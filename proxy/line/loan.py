"""A slot that is lent for work of our own, which gives way to clients.

Whoever reads a prompt ahead of those who will need it asks an instance as a client does: with a
lease, so that nobody's request waits inside the engine, and what is known of its slots stays true.
It waits behind everybody, and it is to leave as soon as anybody else wants something of the
instance: an engine that reads two prompts reads the second when it is through with the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from multidict import CIMultiDict

from proxy.engine.slots import Reach
from proxy.engine.upstream import Upstream
from proxy.errors import UpstreamStopped
from proxy.line.dispatch import Dispatch
from proxy.line.lease import Lease
from proxy.pages import Kind
from proxy.request import Ask

_PATIENCE_S: Final = 5.0

IsWanted = Callable[[], bool]


@asynccontextmanager
async def loan(dispatch: Dispatch, name: str) -> AsyncIterator[IsWanted]:
    """Hold a slot of one instance for the length of the block, which tells whether to leave.

    A block that ends without an error has its slot given back at once; else once the engine has
    confirmed that it is idle.

    Args:
        dispatch: Who leases.
        name: The instance.

    Raises:
        UpstreamStopped: It is not in service, or was stopped.
        ProxyError: No slot was free in five seconds.
    """
    seats = {seat.upstream.name: seat.upstream for seat in dispatch.seats()}
    ours = seats.pop(name, None)
    if ours is None:
        raise UpstreamStopped(name)
    async with dispatch.lease(_ask(ours), seats) as lease:
        if lease.upstream.name != name:
            lease.complete()
            raise UpstreamStopped(name)
        await dispatch.slot(lease, Reach.NONE)
        yield lambda: _is_wanted(dispatch, lease)
        lease.complete()


def _is_wanted(dispatch: Dispatch, lease: Lease) -> bool:
    """Return whether a client waits, or is served beside us, or the instance is to leave."""
    name, model = lease.upstream.name, lease.upstream.model
    waiting = dispatch.demand(model).waiting
    return waiting > 0 or dispatch.busy(name) > 1 or not lease.seat.is_admitted


def _ask(upstream: Upstream) -> Ask:
    """Return a request of our own; as one that was passed on, it stays here and loads nothing."""
    return Ask(
        request_id=f"warm-{upstream.name}",
        method="POST",
        path="/v1/chat/completions",
        query="",
        headers=CIMultiDict(),
        body=b"",
        members={},
        kind=Kind.CHAT,
        model=upstream.model,
        client="",
        lane="batch",
        patience_s=_PATIENCE_S,
        is_hopped=True,
        is_ours=True,
    )
