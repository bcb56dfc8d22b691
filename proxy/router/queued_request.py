"""A request that waits for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from proxy.prompt_cache.prompt import session_hash
from proxy.request import ProxyRequest
from proxy.router.fair_queue import QueueEntry
from proxy.router.instances import Instance
from proxy.router.lease import Lease


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """A request in the queue.

    Attributes:
        avoid: Names of instances to take only if there is no other.
        session: The hash of the client's own name for the conversation, or None.
        new_tokens: Tokens of its prompt to compute, as expected when it joined.
        position: When it joined, from 1; 0 if it got a slot at once.
        awaited: The owner for which it waits though another instance has a slot free, or None.
        looks_again_at_s: When it chooses again in any case.
    """

    request: ProxyRequest
    avoid: Collection[str] = ()
    session: int | None = None
    lease: Lease | None = None
    new_tokens: int = 0
    position: int = 0
    awaited: Instance | None = None
    looks_again_at_s: float = 0.0
    _wake: asyncio.Event | None = field(default=None, init=False)

    @property
    def wake(self) -> asyncio.Event:
        """Set when it gets a lease, and when no instance is left that could give it one."""
        if self._wake is None:  # most requests never wait
            self._wake = asyncio.Event()
        return self._wake


def queued(request: ProxyRequest, avoid: Collection[str], now_s: float) -> QueuedRequest:
    return QueuedRequest(
        client=request.client,
        priority=request.priority,
        joined_at_s=now_s,
        timeout_s=request.queue_timeout_s,
        request=request,
        avoid=avoid,
        session=session_hash(request.model, request.client, request.session)
        if request.session
        else None,
    )
