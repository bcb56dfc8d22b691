"""Has an engine read prompts ahead, one after another, each once a run.

What is not read before the engine serves is read after it, while nobody asks anything of it. A
request that comes in ends the reading of a prompt, which is begun anew later, some times at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from supervisor.life import slots
from supervisor.life.llama import EngineSilent, Llama, Refused
from supervisor.life.prompts import WarmPrompt
from supervisor.life.warm import Prefilled, prefill

_TICK_S: Final = 0.1
_TRIES_MAX: Final = 5

Tell = Callable[[WarmPrompt, Prefilled | Refused], None]


class Reading:
    """The prompts that one run of an engine has to read ahead.

    Args:
        prompts: In their order.
        tell: Told of each prompt that was read, or refused.
    """

    def __init__(self, prompts: Sequence[WarmPrompt], tell: Tell) -> None:
        self._left = deque(prompts)
        self._tell = tell
        self._tries = 0
        self._is_bounded = False

    async def begin(self, llama: Llama, restored: int) -> None:
        """Read what there are slots for beside those that were restored; an end may come any time.

        Args:
            llama: The engine, which serves nobody yet.
            restored: How many slots hold a conversation.
        """
        await self._bound(llama, restored)
        while self._left:
            await self._read_first(llama)

    async def go_on(self, llama: Llama, is_idle: Callable[[], bool]) -> None:
        """Read what is left, as long as nobody else asks anything of the engine."""
        await self._bound(llama, 0)
        while self._left and self._tries < _TRIES_MAX:
            if is_idle():
                self._tries += 1
                await self._read_while(llama, is_idle)
            await asyncio.sleep(_TICK_S)

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
        free = 1 if isinstance(found, Refused) else len(found) - restored
        while len(self._left) > max(0, free):
            self._left.pop()

    async def _read_while(self, llama: Llama, is_idle: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read_first(llama))
            while is_idle():
                done, _ = await asyncio.wait([reading], timeout=_TICK_S)
                if done:
                    self._tries = 0
                    return
            reading.cancel()

    async def _read_first(self, llama: Llama) -> None:
        prompt = self._left[0]
        try:
            found = await prefill(llama, prompt)
        except EngineSilent:  # whoever watches the engine finds out
            self._left.clear()
            return
        self._left.popleft()
        self._tell(prompt, found)
