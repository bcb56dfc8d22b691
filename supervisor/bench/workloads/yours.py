"""The sizes, pauses and overlap of the requests that the daemon recorded.

Prompts are made of plain words, as many tokens as were recorded, and given as tokens: so the sizes
are exact, whatever the template. A conversation goes on from the answers that it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Final

import orjson

from supervisor.bench.figures import Figure, median_rate, percentile
from supervisor.bench.sizes import Sizes
from supervisor.bench.workloads.replay import ReplayedRequest, ReplayLimits, plan_replay
from supervisor.bench.workloads.requests import (
    Reply,
    complete_tokens,
    post,
    present,
    together,
)
from supervisor.bench.workloads.words import WORDS
from supervisor.bench.workloads.workload import (
    MeasuredEngine,
    Outcome,
    Workload,
    WorkloadFailed,
)
from supervisor.engine_client.client import EngineClient
from supervisor.host.paths import Directories
from supervisor.request_record.files import RecordFiles

_REQUESTS_MIN: Final = 8
# Each of the sizes named takes about two seconds on the fastest variant.
_SHARES: Final = 6


def unavailable(model: str, directories: Directories) -> str | None:
    """Return why nothing can be replayed for a model, as a clause."""
    count = len(RecordFiles(directories.request_record).requests(model))
    if count >= _REQUESTS_MIN:
        return None
    noun = "request is" if count == 1 else "requests are"
    return (
        f"{count} {noun} recorded of {model}, and {_REQUESTS_MIN} are needed; the daemon records "
        "answered requests while record_requests is on (corral record show)"
    )


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    recorded = RecordFiles(engine.directories.request_record).requests(engine.model)
    requests = plan_replay(recorded, _limits(engine.sizes))
    if not requests:
        raise WorkloadFailed(f"no request of {engine.model} is recorded")
    async with _clients(engine, requests) as clients:
        words = await _word_tokens(clients[0])
        replay = _Replay(requests, clients, words, rng, names_slots=engine.names_slots)
        began_s = time.perf_counter()
        replies = await replay.run()
        took_s = time.perf_counter() - began_s
    return Outcome(_values(replies, took_s), sum(one.tokens for one in replies))


def _limits(sizes: Sizes) -> ReplayLimits:
    return ReplayLimits(sizes.context, _SHARES * sizes.long_prompt, _SHARES * sizes.generation)


@asynccontextmanager
async def _clients(
    engine: MeasuredEngine, requests: Sequence[ReplayedRequest]
) -> AsyncIterator[list[EngineClient]]:
    """Open a client for each conversation."""
    count = 1 + max(one.conversation for one in requests)
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(engine.client()) for _ in range(count)]


async def _word_tokens(client: EngineClient) -> Sequence[int]:
    answer = orjson.loads(await post(client, "/tokenize", {"content": " ".join(WORDS)}))
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise WorkloadFailed("/tokenize: an answer without tokens")
    return tokens


class _Replay:
    """One run of a replay; the texts are chosen before the first request is sent."""

    def __init__(
        self,
        requests: Sequence[ReplayedRequest],
        clients: Sequence[EngineClient],
        words: Sequence[int],
        rng: Random,
        *,
        names_slots: bool,
    ) -> None:
        self._names_slots = names_slots
        self._requests = requests
        self._clients = clients
        most = max(one.prompt for one in requests)
        self._common = rng.choices(words, k=most)
        self._own = [rng.choices(words, k=one.prompt) for one in requests]
        self._answered = [asyncio.Event() for _ in requests]
        # Of each conversation: its last prompt with the answer to it.
        self._histories: dict[int, list[int]] = {}
        # By slot, the conversation that it was last used for.
        self._holds: dict[int, int] = {}
        self._unnamed = 0

    async def run(self) -> list[Reply]:
        return await together([self._send(place) for place in range(len(self._requests))])

    async def _send(self, place: int) -> Reply:
        request = self._requests[place]
        for before in request.after:
            await self._answered[before].wait()
        await asyncio.sleep(request.pause_s)
        prompt = self._prompt(place)
        client = self._clients[request.conversation]
        slot = self._slot(request.conversation)
        self._unnamed += slot is None
        try:
            reply = await complete_tokens(client, prompt, request.answer, slot)
        finally:
            self._unnamed -= slot is None
        if reply.id_slot is not None:
            self._holds[reply.id_slot] = request.conversation
        self._histories[request.conversation] = [*prompt, *reply.token_ids]
        self._answered[place].set()
        return reply

    def _slot(self, conversation: int) -> int | None:
        """Return the slot that holds a conversation, unless the engine may just have taken it."""
        if not self._names_slots or self._unnamed:
            return None
        held = [slot for slot, one in self._holds.items() if one == conversation]
        return held[0] if held else None

    def _prompt(self, place: int) -> list[int]:
        request = self._requests[place]
        history = self._histories.get(request.conversation, self._common)
        shared = history[: request.shared]
        return [*shared, *self._own[place][: request.prompt - len(shared)]]


def _values(replies: Sequence[Reply], took_s: float) -> Mapping[str, float]:
    first_ms = [one.first_token_ms for one in replies]
    return present(
        {
            "yours.first_token_p50": percentile(first_ms, 0.5),
            "yours.first_token_p95": percentile(first_ms, 0.95),
            "yours.decode_rate": median_rate([one.decode_rate for one in replies]),
            "yours.duration": took_s,
            "yours.prompt_tokens": sum(one.timings.prompt_tokens for one in replies),
        }
    )


YOURS: Final = Workload(
    "yours",
    "sizes and pauses of the requests that the daemon recorded",
    (
        Figure("yours.first_token_p50", "first token, median", "ms"),
        Figure("yours.first_token_p95", "first token, 95 of 100", "ms"),
        Figure("yours.decode_rate", "one stream", "tokens/s"),
        Figure("yours.duration", "all of it", "s"),
        Figure("yours.prompt_tokens", "prompt tokens computed", "tokens"),
    ),
    _run,
    unavailable=unavailable,
)
