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

from supervisor.life import slots
from supervisor.life.idle import TICK_S, finish
from supervisor.life.llama import EngineSilent, Llama, Refused
from supervisor.life.prompts import WarmPrompt
from supervisor.life.traffic import NotLent, Traffic
from supervisor.life.warm import Prefilled, prefill

_TRIES_MAX: Final = 5

Tell = Callable[[WarmPrompt, Prefilled | Refused], None]


class Reading:
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

    async def begin(self, llama: Llama, restored: int) -> None:
        """Read what there are slots for; an end may come any time.

        Args:
            llama: The engine, which serves nobody yet.
            restored: How many slots hold a conversation.
        """
        await self._bound(llama, restored)
        while self._has_more:
            await self._go_on(llama)

    async def go_on(
        self, llama: Llama, traffic: Traffic, name: str, patience_s: float = math.inf
    ) -> None:
        """Read what is left, as long as nobody else asks anything of the engine.

        Args:
            llama: The engine.
            traffic: Who lends the instance, and asks it back.
            name: The instance.
            patience_s: How long to wait for moments in which nobody does.
        """
        await self._bound(llama, 0)
        until_s = time.monotonic() + patience_s
        while self._has_more and self._tries < _TRIES_MAX and time.monotonic() < until_s:
            if traffic.pulse(name).in_flight == 0:
                with suppress(NotLent):
                    async with traffic.lend(name) as is_wanted:
                        await finish(self._go_on(llama), is_wanted)
                    continue
            await asyncio.sleep(TICK_S)

    @property
    def _has_more(self) -> bool:
        return bool(self._left) or self._is_hidden

    async def _bound(self, llama: Llama, restored: int) -> None:
        """Drop the last prompts, those for which no slot is left."""
        if not self._left or self._is_bounded:
            return
        try:
            found = await slots.look(llama)
        except EngineSilent:
            self._left.clear()
            return
        self._is_bounded = True
        taken = 0 if self._has_ram else restored
        free = 1 if isinstance(found, Refused) else len(found) - taken
        while len(self._left) > max(0, free):
            self._left.pop()

    async def _go_on(self, llama: Llama) -> None:
        """Read the first that is left; after the last, see that the next request finds them.

        An engine that does not match prompts looks for them in its cache-ram, as that was when its
        last task began, and puts idle slots there whenever one begins. Without a task in between,
        the first request would not find what was read for it; nor would a prompt that is begun anew
        find what was read of it, and that part would later be taken for the whole.
        """
        try:
            if self._left and not self._is_cut:
                await self._read(llama, self._left[0])
            else:
                await llama.one_token()
                self._is_cut = self._is_hidden = False
        except EngineSilent:  # whoever watches the engine finds out
            self._left.clear()
            self._is_hidden = False

    async def _read(self, llama: Llama, prompt: WarmPrompt) -> None:
        self._tries += 1
        self._is_cut = True
        found = await prefill(llama, prompt)
        self._is_cut = False
        self._tries = 0
        self._left.popleft()
        self._is_hidden = self._is_hidden or isinstance(found, Prefilled)
        self._tell(prompt, found)
