"""Has an engine read prompts ahead, one after another, each once a run.

What is not read before the engine serves is read after it, while nobody asks anything of it. A
request that comes in ends the reading of a prompt, which is begun anew later, some times at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from proxy.upstream.timings import Timings
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.warmup.background import (
    TICK_S,
    BackgroundLeases,
    LeaseUnavailable,
    run_until_preempted,
)
from supervisor.warmup.prefill import prefill
from supervisor.warmup.prompts import WarmPrompt

_TRIES_MAX: Final = 5

Tell = Callable[[WarmPrompt, Timings | ErrorResponse], None]


class PrefillQueue:
    """The prompts that one run of an engine has to read ahead.

    Args:
        prompts: In their order.
        tell: Told of each prompt that was read, or refused.
        has_ram: Whether the engine still knows what a slot held that is taken for a prompt.
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
        """Read what there are slots for; an end may come any time.

        Args:
            client: The engine, which serves nobody yet.
            restored: How many slots hold a conversation.
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
        """Read what is left, as long as nobody else asks anything of the engine.

        Args:
            client: The engine.
            traffic: Who lends the instance, and asks it back.
            name: The instance.
            timeout_s: How long to wait for moments in which nobody does.
        """
        await self._bound(client, 0)
        until_s = time.monotonic() + timeout_s
        while self._has_more and self._tries < _TRIES_MAX and time.monotonic() < until_s:
            if traffic.activity(name).in_flight == 0:
                with suppress(LeaseUnavailable):
                    async with traffic.background_lease(name) as is_wanted:
                        await run_until_preempted(self._go_on(client), is_wanted)
                    continue
            await asyncio.sleep(TICK_S)

    @property
    def _has_more(self) -> bool:
        return bool(self._left) or self._is_hidden

    async def _bound(self, client: EngineClient, restored: int) -> None:
        """Drop the last prompts, those for which no slot is left."""
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
        """Read the first that is left; after the last, see that the next request finds them.

        An engine that does not match prompts looks for them in its cache-ram, as that was when its
        last task began, and puts idle slots there whenever one begins. Without a task in between,
        the first request would not find what was read for it; nor would a prompt that is begun anew
        find what was read of it, and that part would later be taken for the whole.
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
