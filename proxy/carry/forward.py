"""Has a request answered: a lease, an exchange with the instance, one more try where that is safe.

An instance that does not begin to answer, has not loaded its model yet, breaks off before anything
of its answer went out, or is stopped before that, is forgiven once: the request goes to another, or
to the same where there is no other. Never where its engine crashed: it may have been the cause.
What breaks later breaks the answer. A client that leaves closes the connection upstream at once,
and the instance is not blamed.

An instance that sends no first byte and does not answer `/health` either is left for another as
soon as that has a slot free. The prompts of an array are requests of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from proxy.carry.answer import Answer
from proxy.carry.array import PromptArray, array_of
from proxy.carry.delivery import Delivery
from proxy.carry.part import Part, PartRefused, Parts, parts_of
from proxy.carry.readdress import readdressed
from proxy.carry.shape import Shape, plain, shaped
from proxy.carry.waiting import ping_for, waiting
from proxy.carry.writer import Writer
from proxy.engine.exchange import Letter, exchange
from proxy.engine.upstream import Node
from proxy.errors import (
    UpstreamFailed,
    UpstreamSilent,
    UpstreamStopped,
    UpstreamTimeout,
    UpstreamUnreached,
)
from proxy.line.dispatch import Dispatch
from proxy.line.lease import Lease
from proxy.record import Tell
from proxy.request import Ask
from proxy.settings import ProxySettings

# An instance is left once in two seconds; with more of them silent than this, it is a failure.
_MOVES_MAX: Final = 4

_LARGE_BYTES: Final = 1024**2


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
        if array := array_of(ask):
            await self._carry_parts(array, answer)
            return
        shape = shaped(ask)
        async with waiting(answer, ping_for(ask.kind) if shape.is_passed_stream else None):
            await self._carry_one(ask, shape, answer)

    async def _carry_one(self, ask: Ask, shape: Shape, answer: Writer) -> None:
        try:
            await self._ask(ask, shape, answer)
        except (UpstreamUnreached, UpstreamStopped) as error:
            if answer.is_committed:
                raise
            await self._ask(ask, shape, answer, avoid=(error.instance,))

    async def _carry_parts(self, array: PromptArray, answer: Answer) -> None:
        """Have the prompts of an array answered, as many at once as slots are given for them.

        One of them at a time waits for its turn, so the request has one place in the line.
        """
        is_stream = array.ask.is_stream and array.ask.kind.generates
        parts = parts_of(array, answer)
        async with waiting(answer, ping_for(array.ask.kind) if is_stream else None):
            try:
                await self._carry_all(array, parts)
            except PartRefused as refused:
                await answer.refuse(refused.status, refused.headers, refused.body)
            else:
                await parts.finish()

    async def _carry_all(self, array: PromptArray, parts: Parts) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(array.prompts)):
                    part = parts.part(at)
                    task = group.create_task(self._carry_part(array.part(at), part))
                    await _leased(part, task)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # as it is: a task group wraps it up

    async def _carry_part(self, ask: Ask, part: Part) -> None:
        await self._carry_one(ask, shaped(ask), part)
        part.end()

    async def _ask(
        self, ask: Ask, shape: Shape, answer: Writer, avoid: Collection[str] = ()
    ) -> None:
        """Ask an instance, and others instead as long as those that are asked are not there."""
        for _ in range(_MOVES_MAX):
            try:
                await self._attempt(ask, shape, answer, avoid)
            except UpstreamSilent as error:
                avoid = (*avoid, error.instance)
                answer.record.tell_broken(self._tell, error)
            else:
                return
        await self._attempt(ask, shape, answer, avoid)

    async def _attempt(
        self, ask: Ask, shape: Shape, answer: Writer, avoid: Collection[str] = ()
    ) -> None:
        async with self._dispatch.lease(ask, avoid) as lease:
            answer.leased(lease)
            slot = await self._dispatch.slot(lease, shape.reach)
            try:
                async with self._dispatch.computation(lease):
                    if not await self._exchange(shape, slot, lease, answer):
                        await self._exchange(plain(ask), slot, lease, answer)
            except (UpstreamFailed, UpstreamTimeout) as error:
                answer.record.tell_broken(self._tell, error)
                raise

    async def _exchange(self, shape: Shape, slot: int | None, lease: Lease, answer: Writer) -> bool:
        """Ask the instance once; return whether the client has its answer."""
        letter = _letter(lease.ask, shape.naming(slot))
        if node := lease.upstream.node:
            letter = await _readdressed(letter, node, lease.ask)
        async with exchange(lease.upstream, letter, self._settings) as reply:
            self._dispatch.answered(lease)
            return await Delivery(shape, lease, reply, answer).carry()


async def _readdressed(letter: Letter, node: Node, ask: Ask) -> Letter:
    """Return a letter as a node is to read it; a large one is written again in a thread."""
    if len(letter.body) <= _LARGE_BYTES:
        return readdressed(letter, node, ask.form)
    return await asyncio.to_thread(readdressed, letter, node, ask.form)


def _letter(ask: Ask, body: bytes) -> Letter:
    headers = ask.headers.copy()
    headers["X-Request-Id"] = ask.request_id
    return Letter(ask.method, ask.path, ask.query, headers, body)


async def _leased(part: Part, task: asyncio.Task[None]) -> None:
    """Return once an instance has a part, or its task is over."""
    task.add_done_callback(lambda _: part.is_leased.set())
    await part.is_leased.wait()
