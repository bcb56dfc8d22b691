"""Moves requests away from instances that send no first byte and do not respond.

The kernel accepts connections for a stopped process, which sends nothing. An engine that computes a
long prompt sends nothing either, but answers `/health` at once. So while a request waits for its
first byte, its instance is queried. A silent instance gets no more requests as long as another
responds, and its requests without a first byte move to free slots elsewhere. It is queried each
second until it answers. Without another instance no query is sent, and no request moves to a busy
instance.

Source: `/health` of build 10434 answers in 0.2 ms while all slots are busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from proxy.errors import (
    ProxyError,
    UpstreamConnectFailed,
    UpstreamSilent,
    UpstreamUnconnected,
)
from proxy.router.lease import Lease, RoutingTarget
from proxy.router.registry import Instances
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.upstream import Upstream

FIRST_BYTE_S: Final = 1.0
_HEALTH_S: Final = 1.0
# If the query ends this late after its time limit, this process stood still, not the instance.
_LATE_S: Final = 0.25
_HEALTH_MAX_BYTES: Final = 64 * 1024

# Errors that show that no process listens any more.
_ENDED: Final = (ConnectionError, FileNotFoundError)

Responds = Callable[[Upstream], Awaitable[bool]]


class FirstByteMonitor:
    """Watches the requests of all instances that wait for their first byte.

    Args:
        responds: Returns within a second whether an instance responds.
        changed: Called with the model of an instance that became silent, or responds again.
    """

    def __init__(
        self, instances: Instances, responds: Responds, changed: Callable[[str], None]
    ) -> None:
        self._instances = instances
        self._responds = responds
        self._changed = changed
        self._group: asyncio.TaskGroup | None = None
        self._waiting: dict[Lease, float] = {}  # with the time of its check, the earliest first
        self._timer: asyncio.TimerHandle | None = (
            None  # one for all leases: a timer costs microseconds
        )
        self._queried: set[RoutingTarget] = set()

    async def serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()  # as long as the proxy runs
        finally:
            self._group = None
            self._queried.clear()

    def watch(self, lease: Lease) -> None:
        """Watch a request until `forget`; a node watches its own requests."""
        if self._group is not None and lease.upstream.node is None:
            self._add(lease)

    def forget(self, lease: Lease) -> None:
        self._waiting.pop(lease, None)

    def _add(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[lease] = loop.time() + FIRST_BYTE_S
        if self._timer is None:
            self._timer = loop.call_later(FIRST_BYTE_S, self._check_due)

    def _check_due(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due = [lease for lease, due_at_s in self._waiting.items() if due_at_s <= now_s]
        for lease in due:
            del self._waiting[lease]
        first_at_s = next(iter(self._waiting.values()), None)
        self._timer = None
        if first_at_s is not None:
            self._timer = loop.call_at(first_at_s, self._check_due)
        for lease in due:
            if not lease.progress.has_header:
                self._suspect(lease)

    def _suspect(self, lease: Lease) -> None:
        self._add(lease)
        instance = lease.instance
        if (
            self._group is not None
            and instance not in self._queried
            and self._other_instances(instance)
        ):
            self._queried.add(instance)
            self._group.create_task(self._examine(instance))

    async def _examine(self, instance: RoutingTarget) -> None:
        """Query an instance until it responds; it gets no requests meanwhile."""
        try:
            while await self._is_gone(instance) and instance.in_service:
                if not instance.is_silent:
                    self._instances.set_silent(instance, is_silent=True)
                    self._changed(instance.upstream.model)
                self._move(instance)
                await asyncio.sleep(FIRST_BYTE_S)
        finally:
            self._queried.discard(instance)
            if instance.is_silent:
                self._instances.set_silent(instance, is_silent=False)
                self._changed(instance.upstream.model)

    async def _is_gone(self, instance: RoutingTarget) -> bool:
        loop = asyncio.get_running_loop()
        began_at_s = loop.time()
        responds = await self._responds(instance.upstream)
        is_late = loop.time() - began_at_s > _HEALTH_S + _LATE_S
        return not responds and (instance.is_silent or not is_late)

    def _move(self, instance: RoutingTarget) -> None:
        """Abort requests without a first byte for which another instance has a free slot."""
        others = self._other_instances(instance)
        free = sum(other.free for other in others)
        waiting = [lease for lease in self._waiting if not lease.progress.has_header]
        for lease in [lease for lease in waiting if lease.instance is instance]:
            needed = instance.slots_needed(lease.request) if lease.request.kind.takes_slot else 0
            if others and needed <= free:
                free -= needed
                self.forget(lease)
                reason = "sent no first byte and does not answer /health"
                lease.abort(UpstreamSilent(instance.upstream.name, reason))

    def _other_instances(self, instance: RoutingTarget) -> list[RoutingTarget]:
        """Return the other instances of the same model that are not silent."""
        admitted = self._instances.in_service(instance.upstream.model)
        return [other for other in admitted if other is not instance and not other.is_silent]


def answers_health(settings: ProxySettings) -> Responds:
    """Return a query of `/health`; any answer counts.

    A refused or broken connection also counts: it means that the process ended. Its requests notice
    that themselves, and a request that crashed it must not move to another instance.
    """

    async def request(upstream: Upstream) -> bool:
        health = get_request("/health")
        try:
            await fetch(upstream, health, settings, _HEALTH_S, _HEALTH_MAX_BYTES)
        except UpstreamConnectFailed as error:
            is_closed = not isinstance(error, UpstreamUnconnected)
            return is_closed or isinstance(error.__cause__, _ENDED)
        except ProxyError:
            return False
        return True

    return request
