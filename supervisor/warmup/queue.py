"""Prefills prompts one after another, each once per run of an engine.

Prompts that are not prefilled before the engine serves follow while it is idle. A client's request
cancels the prefill of a prompt, which is retried later, a few times at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from proxy.errors import ProxyError
from proxy.upstream.timings import Timings
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.warmup.background import (
    TICK_S,
    BackgroundLeases,
    Preempted,
    run_until_preempted,
)
from supervisor.warmup.prefill import prefill
from supervisor.warmup.prompts import WarmPrompt

_TRIES_MAX: Final = 5

Tell = Callable[[WarmPrompt, Timings | ErrorResponse], None]


class PrefillQueue:
    """The prompts that one run of an engine has to prefill, in order; `tell` gets each result.

    With `has_ram` the engine keeps the content of a slot that a prompt replaces.
    """

    def __init__(self, prompts: Sequence[WarmPrompt], tell: Tell, *, has_ram: bool = False) -> None:
        self._has_ram = has_ram
        self._left = deque(prompts)
        self._tell = tell
        self._tries = 0
        self._is_bounded = False
        self._is_cut = False  # the last one, on its way
        self._is_hidden = False  # those that were read

    async def begin(self, client: EngineClient, restored: int) -> None:
        """Prefill as many prompts as slots are free, before the engine serves; can be cancelled.

        `restored` slots hold a conversation.
        """
        await self._bound(client, restored)
        while self._has_more:
            await self._go_on(client)

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
                    async with traffic.background_lease(name) as is_wanted:
                        await run_until_preempted(self._go_on(client), is_wanted)
                    continue
            await asyncio.sleep(TICK_S)

    @property
    def _has_more(self) -> bool:
        return bool(self._left) or self._is_hidden

    async def _bound(self, client: EngineClient, restored: int) -> None:
        """Drop the last prompts, for which no slot is left."""
        if not self._left or self._is_bounded:
            return
        try:
            found = await slots.get_slots(client)
        except EngineUnreachable:
            self._left.clear()
            return
        self._is_bounded = True
        taken = 0 if self._has_ram else restored
        free = 1 if isinstance(found, ErrorResponse) else len(found) - taken
        while len(self._left) > max(0, free):
            self._left.pop()

    async def _go_on(self, client: EngineClient) -> None:
        """Prefill the first prompt; after the last, make sure that the next request finds them.

        An engine that does not match prompts searches its cache-ram, as it was when its last task
        started, and saves idle slots there whenever a task starts. Without a task in between, the
        first request would not find the prefilled prompt; nor would the retry of a prompt find its
        processed part, which would later be taken for the whole.
        """
        try:
            if self._left and not self._is_cut:
                await self._read(client, self._left[0])
            else:
                await client.one_token()
                self._is_cut = self._is_hidden = False
        except EngineUnreachable:  # whoever watches the engine finds out
            self._left.clear()
            self._is_hidden = False

    async def _read(self, client: EngineClient, prompt: WarmPrompt) -> None:
        self._tries += 1
        self._is_cut = True
        found = await prefill(client, prompt)
        self._is_cut = False
        self._tries = 0
        self._left.popleft()
        self._is_hidden = self._is_hidden or isinstance(found, Timings)
        self._tell(prompt, found)
