"""Conversations of many clients: shared system prompts, some turns, some that come back later.

Their prompts are hashes without a text, made from a seed: as long as a text of as many tokens.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from proxy.cache.prompt import BLOCK_TOKENS, NO_OUTLINE, Prompt
from proxy.request.request import Priority, ProxyRequest
from proxy.upstream.endpoint_kinds import EndpointKind

MODEL: Final = "chat"
CLIENTS: Final = 50
# Of the requests, how many belong to the clients that send most: one in ten sends as many as these.
_GREEDY_SHARE: Final = 0.5
_SYSTEM_PROMPTS: Final = 20
_BATCH_SHARE: Final = 0.1
_RETURNS_SHARE: Final = 0.25
_NO_HASH: Final = hashlib.blake2b(digest_size=8)


@dataclass(slots=True)
class SimulatedPrompt(Prompt):
    """A prompt; `reply_hash` identifies it with the answer."""

    reply_hash: int

    def hash_with_reply(self, reply: object) -> int:
        del reply
        return self.reply_hash


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        conversation: Its number.
        system: The number of its system prompt.
        system_tokens: Of that.
        history_tokens: Of the turns before it, system prompt and answers included; 0 at the first.
        answer_tokens: That it asks for.
        pause_s: After its answer, before the next turn.
    """

    request: ProxyRequest
    conversation: int
    system: int
    system_tokens: int
    history_tokens: int
    answer_tokens: int
    pause_s: float

    @property
    def tokens(self) -> int:
        assert self.request.prompt  # noqa: S101 (for the type)
        return self.request.prompt.tokens


def turns(seed: int, conversation: int) -> Iterator[Turn]:
    """Yield the turns of a conversation, the same ones for a seed and a number."""
    rng = random.Random(f"{seed} {conversation}")  # noqa: S311 (a workload, no secret)
    system = min(int(rng.expovariate(0.25)), _SYSTEM_PROMPTS - 1)
    blocks, hashes = array("Q", _system(seed, system)), [rng.getrandbits(64)]
    system_tokens = len(blocks) * BLOCK_TOKENS
    tokens, history_tokens = system_tokens, 0
    is_batch = rng.random() < _BATCH_SHARE
    count = 1 if is_batch else 1 + min(int(rng.expovariate(0.5)), 7)
    client = _client(rng)
    priority: Priority = "batch" if is_batch else "interactive"
    returns_after = count // 2 if rng.random() < _RETURNS_SHARE else 0
    for turn in range(1, count + 1):
        tokens += rng.randint(20, 300)
        blocks.extend(rng.getrandbits(64) for _ in range(tokens // BLOCK_TOKENS - len(blocks)))
        hashes = [*hashes[-30:], rng.getrandbits(64)]
        reply_hash, answer_tokens = rng.getrandbits(64), rng.randint(20, 200)
        prompt = SimulatedPrompt(
            tuple(blocks),
            tuple(hashes),
            tokens,
            hashes[1],
            1,
            NO_OUTLINE,
            (),
            0,
            _NO_HASH,
            0,
            reply_hash,
        )
        pause_s = rng.uniform(100, 200) if turn == returns_after else rng.expovariate(0.1)
        yield Turn(
            _request(prompt, client, priority),
            conversation,
            system,
            system_tokens,
            history_tokens,
            answer_tokens,
            pause_s,
        )
        tokens += answer_tokens
        history_tokens = tokens
        hashes.append(reply_hash)


@lru_cache
def _system(seed: int, number: int) -> tuple[int, ...]:
    rng = random.Random(f"{seed} system {number}")  # noqa: S311 (as above)
    return tuple(rng.getrandbits(64) for _ in range(rng.randint(300, 1500) // BLOCK_TOKENS))


def _client(rng: random.Random) -> str:
    most = CLIENTS // 10 if rng.random() < _GREEDY_SHARE else CLIENTS
    return f"client-{rng.randrange(most)}"


_REQUEST: Final = ProxyRequest(
    request_id="req_simulated",
    path="/v1/chat/completions",
    kind=EndpointKind.CHAT,
    model=MODEL,
    queue_timeout_s=120.0,
)


def _request(prompt: Prompt, client: str, priority: Priority) -> ProxyRequest:
    return replace(_REQUEST, prompt=prompt, client=client, priority=priority)
