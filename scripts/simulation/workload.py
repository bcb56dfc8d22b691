"""Requests of two kinds: conversations of many clients, and prompts that share long beginnings.

Conversations have shared system prompts, some turns, and come back later now and then. The shared
beginnings are those of llm-d's published benchmark. Prompts are hashes without a text, made from a
seed: as long as a text of as many tokens.

Source: llm-d-kv-cache-manager, `benchmarking/73-capacity`: the profile of inference-perf (150
groups of 5 prompts, sent in one shuffled order again and again), its rates and their durations.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from proxy.cache.prompt import BLOCK_BYTES, BLOCK_TOKENS, Outline, Prompt
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
_TOKEN_BYTES: Final = BLOCK_BYTES // BLOCK_TOKENS


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
    pause_s: float = 0.0

    @property
    def tokens(self) -> int:
        assert self.request.prompt  # noqa: S101 (for the type)
        return self.request.prompt.tokens


class _Text:
    """A prompt that grows by parts: the system prompt, then the user's and the assistant's."""

    def __init__(self, system: tuple[int, ...], rng: random.Random) -> None:
        self._rng = rng
        self._blocks = list(system)
        self._hashes = [system[-1] ^ 1]  # neither a block's, nor another prompt's
        self._sizes_tokens = [len(system) * BLOCK_TOKENS]
        self.tokens = self._sizes_tokens[0]

    def add(self, tokens: int, part_hash: int) -> None:
        self.tokens += tokens
        more = self.tokens // BLOCK_TOKENS - len(self._blocks)
        self._blocks += [self._rng.getrandbits(64) for _ in range(more)]
        self._hashes.append(part_hash)
        self._sizes_tokens.append(tokens)

    def prompt(self, reply_hash: int) -> SimulatedPrompt:
        hashes, parts = tuple(self._hashes), len(self._hashes)
        sizes_bytes = tuple(_TOKEN_BYTES * tokens for tokens in self._sizes_tokens)
        labels = (b"s" + b"ua" * parts)[:parts]
        outline = Outline(hashes, sizes_bytes, tuple(range(parts)), labels)
        known = hashes[1], 1, outline, (), 0, _NO_HASH, 0
        return SimulatedPrompt(tuple(self._blocks), hashes, self.tokens, *known, reply_hash)


def turns(seed: int, conversation: int) -> Iterator[Turn]:
    """Yield the turns of a conversation, the same ones for a seed and a number."""
    rng = random.Random(f"{seed} {conversation}")  # noqa: S311 (a workload, no secret)
    system = min(int(rng.expovariate(0.25)), _SYSTEM_PROMPTS - 1)
    text = _Text(_system(seed, system), rng)
    system_tokens, history_tokens = text.tokens, 0
    is_batch = rng.random() < _BATCH_SHARE
    count = 1 if is_batch else 1 + min(int(rng.expovariate(0.5)), 7)
    client = _client(rng)
    priority: Priority = "batch" if is_batch else "interactive"
    returns_after = count // 2 if rng.random() < _RETURNS_SHARE else 0
    for turn in range(1, count + 1):
        text.add(rng.randint(20, 300), rng.getrandbits(64))
        reply_hash, answer_tokens = rng.getrandbits(64), rng.randint(20, 200)
        request = replace(
            _REQUEST, prompt=text.prompt(reply_hash), client=client, priority=priority
        )
        pause_s = rng.uniform(100, 200) if turn == returns_after else rng.expovariate(0.1)
        yield Turn(
            request, conversation, system, system_tokens, history_tokens, answer_tokens, pause_s
        )
        text.add(answer_tokens, reply_hash)
        history_tokens = text.tokens


@lru_cache
def _system(seed: int, number: int) -> tuple[int, ...]:
    rng = random.Random(f"{seed} system {number}")  # noqa: S311 (as above)
    return tuple(rng.getrandbits(64) for _ in range(rng.randint(300, 1500) // BLOCK_TOKENS))


def _client(rng: random.Random) -> str:
    most = CLIENTS // 10 if rng.random() < _GREEDY_SHARE else CLIENTS
    return f"client-{rng.randrange(most)}"


GROUPS: Final = 150
_PROMPTS: Final = 5
_PREFIX_TOKENS: Final = 6000
_QUESTION_TOKENS: Final = 1200
_ANSWER_TOKENS: Final = 1000
_NO_TIMEOUT_S: Final = 3600.0
# Requests per second and seconds, for eight replicas: the first stage, which only fills the
# caches, and six of the 16 others.
STAGES: Final = ((15, 50), (3, 20), (10, 20), (15, 20), (25, 30), (40, 38), (60, 25))


def prompts_of_groups(seed: int) -> list[Turn]:
    """Return the prompts of llm-d's benchmark in the order in which they are sent."""
    rng = random.Random(f"{seed} groups")  # noqa: S311 (as above)
    found: list[Turn] = []
    for group in range(GROUPS):
        prefix = tuple(rng.getrandbits(64) for _ in range(_PREFIX_TOKENS // BLOCK_TOKENS))
        for _ in range(_PROMPTS):
            text = _Text(prefix, rng)
            text.add(_QUESTION_TOKENS, rng.getrandbits(64))
            request = replace(
                _REQUEST,
                prompt=text.prompt(rng.getrandbits(64)),
                client="benchmark",
                queue_timeout_s=_NO_TIMEOUT_S,
            )
            size = _PREFIX_TOKENS, 0, _ANSWER_TOKENS
            found.append(Turn(request, len(found), group, *size))
    rng.shuffle(found)
    return found


_REQUEST: Final = ProxyRequest(
    request_id="req_simulated",
    path="/v1/chat/completions",
    kind=EndpointKind.CHAT,
    model=MODEL,
    queue_timeout_s=120.0,
)
