"""Prefills prompts one after another, each once per run of an engine.

Prompts that are not prefilled before the engine serves follow while it is idle. A client's request
cancels the prefill of a prompt, which is retried later, a few times at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Protocol

from proxy.errors import ProxyError
from proxy.router.instances import Activity
from proxy.upstream.timings import Timings
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.warmup.prefill import prefill
from supervisor.warmup.prompts import WarmPrompt

_TRIES_MAX: Final = 5
_TICK_S: Final = 0.1

OnResult = Callable[[WarmPrompt, Timings | ErrorResponse], None]


class Preempted(Exception):
    """A client needs the leased slot, or the instance is stopping."""


class BackgroundLeases(Protocol):
    """Grants a slot of a serving instance to our own requests, until a client needs it."""

    def activity(self, name: str, /) -> Activity:
        """Cheap enough to be called several times a second."""

    def background_lease(self, name: str, /) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Hold one slot of an instance for the length of the block.

        The block gets a function that returns whether a client needs the slot; it must then raise
        Preempted soon.

        Raises:
            ProxyError: No slot was free, or the instance is stopping.
        """


class PrefillQueue:
    """The prompts that one run of an engine has to prefill, in order; `on_result` gets each result.

    With `has_prompt_cache` the engine keeps the content of a slot that a prompt replaces. What
    `is_saved` needs no prefill: requests go on from its slot file.
    """

    def __init__(
        self,
        prompts: Sequence[WarmPrompt],
        on_result: OnResult,
        *,
        has_prompt_cache: bool = False,
        is_saved: Callable[[WarmPrompt], bool] = lambda _: False,
    ) -> None:
        self._has_prompt_cache = has_prompt_cache
        self._pending = deque(prompts)
        self._on_result = on_result
        self._is_saved = is_saved
        self._tries = 0
        self._is_bounded = False
        self._is_interrupted = False  # the prefill of the first pending prompt
        self._is_unsaved = False  # a prefilled prompt is not in cache-ram yet

    async def begin(self, client: EngineClient, restored: int) -> None:
        """Prefill as many prompts as slots are free, before the engine serves; can be cancelled.

        `restored` slots hold a conversation.
        """
        await self._bound(client, restored)
        while self._has_more:
            await self._process_next(client)

    async def resume(
        self,
        client: EngineClient,
        traffic: BackgroundLeases,
        name: str,
        timeout_s: float = math.inf,
    ) -> None:
        """Prefill the remaining prompts whenever the engine is idle, for `timeout_s` at most."""
        await self._bound(client, 0)
        until_s = time.monotonic() + timeout_s
        while self._has_more and self._tries < _TRIES_MAX and time.monotonic() < until_s:
            if traffic.activity(name).in_flight == 0:
                with suppress(Preempted, ProxyError):
                    async with traffic.background_lease(name) as is_preempted:
                        await run_until_preempted(self._process_next(client), is_preempted)
                    continue
            await asyncio.sleep(_TICK_S)

    @property
    def _has_more(self) -> bool:
        return bool(self._pending) or self._is_unsaved

    async def _bound(self, client: EngineClient, restored: int) -> None:
        """Drop prompts that are saved, and the last ones, for which no slot is left."""
        if not self._pending or self._is_bounded:
            return
        self._pending = deque(one for one in self._pending if not self._is_saved(one))
        try:
            found = await slots.get_slots(client)
        except EngineUnreachable:
            self._pending.clear()
            return
        self._is_bounded = True
        taken = 0 if self._has_prompt_cache else restored
        free = 1 if isinstance(found, ErrorResponse) else len(found) - taken
        while len(self._pending) > max(0, free):
            self._pending.pop()

    async def _process_next(self, client: EngineClient) -> None:
        """Prefill the first prompt; after the last, make sure that the next request finds them.

        An engine that does not match prompts searches its cache-ram, as it was when its last task
        started, and saves idle slots there whenever a task starts. Without a task in between, the
        first request would not find the prefilled prompt; nor would the retry of a prompt find its
        processed part, which would later be taken for the whole.
        """
        try:
            if self._pending and not self._is_interrupted:
                await self._prefill(client, self._pending[0])
            else:
                await client.one_token()
                self._is_interrupted = self._is_unsaved = False
        except EngineUnreachable:  # the health monitor reports it
            self._pending.clear()
            self._is_unsaved = False

    async def _prefill(self, client: EngineClient, prompt: WarmPrompt) -> None:
        self._tries += 1
        self._is_interrupted = True
        found = await prefill(client, prompt)
        self._is_interrupted = False
        self._tries = 0
        self._pending.popleft()
        self._is_unsaved = self._is_unsaved or isinstance(found, Timings)
        self._on_result(prompt, found)


async def run_until_preempted(
    work: Coroutine[Any, Any, None], is_preempted: Callable[[], bool]
) -> None:
    """Run `work`, and cancel it as soon as a client needs the slot.

    Raises:
        Preempted: A client needs the slot; the engine continues to the end of its batch.
        ExceptionGroup: Raised by the work.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_preempted():
            done, _ = await asyncio.wait([task], timeout=_TICK_S)
            if done:
                return
        task.cancel()
    raise Preempted
