"""Has a request answered: a lease, an exchange with the instance, one more try where that is safe.

An instance that does not begin to answer, has not loaded its model yet, breaks off before anything
of its answer went out, or is stopped before that, is forgiven once: the request goes to another, or
to the same where there is no other. What breaks later breaks the answer. A client that leaves
closes the connection upstream at once, and the instance is not blamed.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.carry.answer import Answer
from proxy.carry.delivery import Delivery
from proxy.carry.readdress import readdressed
from proxy.carry.shape import Shape, plain, shaped
from proxy.carry.waiting import ping_for, waiting
from proxy.engine.exchange import Letter, exchange
from proxy.errors import UpstreamFailed, UpstreamStopped, UpstreamTimeout, UpstreamUnreached
from proxy.line.dispatch import Dispatch
from proxy.line.lease import Lease
from proxy.record import Tell
from proxy.request import Ask
from proxy.settings import ProxySettings


class Forward:
    """Carries requests to instances and their answers back."""

    def __init__(self, dispatch: Dispatch, settings: ProxySettings, tell: Tell) -> None:
        self._dispatch = dispatch
        self._settings = settings
        self._tell = tell

    async def carry(self, ask: Ask, answer: Answer) -> None:
        """Have a request answered, with one more try where nothing of the first went out.

        Raises:
            ConnectionError: The client left before its answer was complete.
            ProxyError: No instance took it, or none answered to the end.
        """
        shape = shaped(ask)
        async with waiting(answer, ping_for(ask.kind) if shape.is_passed_stream else None):
            try:
                await self._attempt(ask, shape, answer)
            except (UpstreamUnreached, UpstreamStopped) as error:
                if answer.is_committed:
                    raise
                await self._attempt(ask, shape, answer, avoid=(error.instance,))

    async def _attempt(
        self, ask: Ask, shape: Shape, answer: Answer, avoid: Collection[str] = ()
    ) -> None:
        async with self._dispatch.lease(ask, avoid) as lease:
            answer.record.give(lease.upstream.name, lease.waited_s, lease.expected_cached)
            answer.traces = _traces(lease)
            slot = await self._dispatch.slot(lease, shape.reach)
            try:
                if not await self._exchange(shape, slot, lease, answer):
                    await self._exchange(plain(ask), slot, lease, answer)
            except (UpstreamFailed, UpstreamTimeout) as error:
                answer.record.tell_broken(self._tell, error)
                raise

    async def _exchange(self, shape: Shape, slot: int | None, lease: Lease, answer: Answer) -> bool:
        """Ask the instance once; return whether the client has its answer."""
        letter = _letter(lease.ask, shape.naming(slot))
        if node := lease.upstream.node:
            letter = readdressed(letter, node, lease.ask.form)
        async with exchange(lease.upstream, letter, self._settings) as reply:
            return await Delivery(shape, lease, reply, answer).carry()


def _letter(ask: Ask, body: bytes) -> Letter:
    headers = ask.headers.copy()
    headers["X-Request-Id"] = ask.request_id
    return Letter(ask.method, ask.path, ask.query, headers, body)


def _traces(lease: Lease) -> dict[str, str]:
    """Return what a client is told of how its request fared."""
    traces = {"X-Corral-Instance": lease.upstream.name}
    if lease.position:
        traces["X-Corral-Queue-Position"] = str(lease.position)
        traces["X-Corral-Waited-Ms"] = str(round(lease.waited_s * 1000))
    return traces
