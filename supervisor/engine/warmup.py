"""Warm-up requests before an engine serves, and prompts prefilled ahead of clients.

The first token after loading is slow: pages of the model are read in, threads and kernels are
created. So a prompt of our own computes it, not a client's.

Prompts are prefilled one after another, each once per run of an engine: as many as fit before the
engine serves, the others while it is idle. A client's request cancels the prefill of a prompt,
which is retried later, a few times at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from proxy.errors import ProxyError
from proxy.upstream.upstream import Timings
from supervisor.engine import client as client_module
from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.prompts import WarmPrompt

if TYPE_CHECKING:
    from proxy.router.router import Router

# Streamed, so that the engine notices a cancelled request.
_ONE_TOKEN: Final[Mapping[str, Any]] = {
    "max_tokens": 1,
    "stream": True,
    "return_progress": True,
    "timings_per_token": True,
    "cache_prompt": True,
}

# The cache lacks the last token of an answer, and its end token.
_TOKENS_AWAY_MAX: Final = 2


# A slot that holds a prompt; its tokens, with the generated one; how many of them are cached.
FilledSlot = tuple[int, int, int]


Warmup = Literal["warm", "nothing to warm", "failed"]


async def warm(client: EngineClient) -> Warmup:
    """Generate a token; if the engine rejects that, compute an embedding.

    An engine that rejects both with 4xx or 501 is as ready as it can be. Any other error, or no
    response, means that it is unhealthy. A model that generates no text answers 500 to a completion
    (build 10434).
    """
    try:
        refusal = await client.generate_token()
        if refusal is None:
            return "warm"
        embedding_refusal = await client.make_embedding()
    except EngineUnreachable:
        return "failed"
    can_serve = embedding_refusal is None or all(
        400 <= response.status < 500 or response.status == 501
        for response in (refusal, embedding_refusal)
    )
    return "nothing to warm" if can_serve else "failed"


async def prefill(client: EngineClient, prompt: WarmPrompt) -> Timings | ErrorResponse:
    """Process a prompt and generate one token. No deadline: a long prompt takes long.

    If this is cancelled, the engine stops after its present batch. Raises EngineUnreachable: no
    response.
    """
    timings = None
    async with client.stream("/v1/chat/completions", {**prompt.body, **_ONE_TOKEN}) as events:
        if isinstance(events, ErrorResponse):
            return events
        async for event in events:
            timings = Timings.read(event.get("timings")) or timings
    return timings or Timings(0, 0, 0, 0, 0)


async def prefill_slot(client: EngineClient, prompt: WarmPrompt) -> FilledSlot | None:
    """Prefill a prompt in a slot of the engine's choice; None if it refused or the slot is unknown.

    The slot is assumed to be that of the latest task, so no other requests may be sent meanwhile.
    Raises EngineUnreachable: no response.
    """
    found = await prefill(client, prompt)
    listed = await client_module.get_slots(client)
    if isinstance(found, ErrorResponse) or isinstance(listed, ErrorResponse) or not listed:
        return None
    latest = max(listed, key=attrgetter("task"))
    tokens = found.cached_tokens + found.prompt_tokens + found.decoded_tokens
    if latest.is_busy or not 0 <= tokens - latest.tokens <= _TOKENS_AWAY_MAX:
        return None
    return latest.id_slot, tokens, found.cached_tokens


_TICK_S: Final = 0.1

OnResult = Callable[[WarmPrompt, Timings | ErrorResponse], None]


class Preempted(Exception):
    """A client needs the leased slot, or the instance is stopping."""


class PrefillQueue:
    """The prompts that one run of an engine has to prefill, in order.

    Args:
        on_result: Gets each prompt and its result.
        has_prompt_cache: Whether the engine keeps the content of a slot that a prompt replaces.
        is_saved: Whether a prompt needs no prefill, because requests continue from its slot file.
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
        """Before the engine serves, prefill as many prompts as slots are free; can be cancelled.

        `restored` is the number of slots that hold a conversation.
        """
        await self._drop_surplus(client, restored)
        while self._has_more:
            await self._process_next(client)

    async def resume(
        self, client: EngineClient, traffic: Router, name: str, timeout_s: float = math.inf
    ) -> None:
        """Prefill the remaining prompts whenever the engine is idle, for `timeout_s` at most."""
        await self._drop_surplus(client, 0)
        until_s = time.monotonic() + timeout_s
        while self._has_more and self._tries < 5 and time.monotonic() < until_s:
            if traffic.activity(name).in_flight == 0:
                with suppress(Preempted, ProxyError):
                    async with traffic.background_lease(name, "(warming)") as is_preempted:
                        await run_until_preempted(self._process_next(client), is_preempted)
                    continue
            await asyncio.sleep(_TICK_S)

    @property
    def _has_more(self) -> bool:
        return bool(self._pending) or self._is_unsaved

    async def _drop_surplus(self, client: EngineClient, restored: int) -> None:
        """Drop prompts that are saved, and the last ones if there are more prompts than slots."""
        if not self._pending or self._is_bounded:
            return
        self._pending = deque(prompt for prompt in self._pending if not self._is_saved(prompt))
        try:
            found = await client_module.get_slots(client)
        except EngineUnreachable:
            self._pending.clear()
            return
        self._is_bounded = True
        taken = 0 if self._has_prompt_cache else restored
        free = 1 if isinstance(found, ErrorResponse) else len(found) - taken
        while len(self._pending) > max(0, free):
            self._pending.pop()

    async def _process_next(self, client: EngineClient) -> None:
        """Prefill the first prompt; after the last one, run a task that makes them findable.

        An engine that does not match prompts saves idle slots in its cache-ram whenever a task
        starts, and then searches cache-ram without these. So without a task in between, the first
        request would not find the prefilled prompt; nor would the retry of a prompt find its
        processed part, which would later be taken for the whole prompt.
        """
        try:
            if self._pending and not self._is_interrupted:
                await self._prefill(client, self._pending[0])
            else:
                await client.generate_token()
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
        Preempted: A client needs the slot; the engine still finishes its batch.
        ExceptionGroup: The work failed.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        while not is_preempted():
            done, _ = await asyncio.wait([task], timeout=_TICK_S)
            if done:
                return
        task.cancel()
    raise Preempted
