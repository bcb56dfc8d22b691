"""Compares what a variant generates with a reference whose cache is not rounded.

Greedy tokens alone say little: another number of threads changes the last bits of a sum, and where
two tokens are almost equally probable the text goes another way without being worse. So the
probabilities decide. Where the texts part, the reference's token is put in, and the comparison goes
on from there: all positions have the same text before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from supervisor.bench.workloads.requests import post
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.engine_client.client import EngineClient
from supervisor.tune.divergence import kl_divergence
from supervisor.tune.engines import tokens_of
from supervisor.tune.texts import TEXTS

# In nats, the mean over all tokens.
LIMIT: Final = 0.02
# A text that parts more often is not compared to its end.
_PARTS_MAX: Final = 16
_GREEDY: Final[Mapping[str, Any]] = {
    "temperature": 0,
    "n_probs": 40,
    "ignore_eos": True,
    "return_tokens": True,
}


@dataclass(frozen=True, slots=True)
class Position:
    """One generated token, and the log-probabilities of the most probable ones.

    A token that was drafted and accepted has none. Source: llama-server, builds 10434 and 11434.
    """

    token: int
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what followed it."""

    prompt: tuple[int, ...]
    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """What a variant changes.

    Attributes:
        equal: Tokens as in the reference, of `total`.
        divergence: The mean Kullback-Leibler divergence in nats; None where nothing was reported.
    """

    equal: int
    total: int
    divergence: float | None

    def __str__(self) -> str:
        if self.divergence is None:
            return f"{self.equal} of {self.total} tokens equal"
        if self.equal == self.total:
            return f"answers equal on {self.total} tokens, KL divergence {self.divergence:.5f}"
        text = f"KL divergence {self.divergence:.5f} on {self.total} tokens"
        return f"{text}, {self.total - self.equal} of them differ"

    def reason_against(self, limit: float = LIMIT) -> str | None:
        if self.divergence is None or self.divergence <= limit:
            return None
        return f"its answers change too much: {self}, the limit is {limit:g}"


async def record(client: EngineClient, tokens: int) -> tuple[Answer, ...]:
    """Generate so many tokens for each text, greedily."""
    answers = []
    for text in TEXTS:
        prompt = await tokens_of(client, text)
        answers.append(Answer(tuple(prompt), await _greedy(client, prompt, tokens)))
    return tuple(answers)


async def compare(client: EngineClient, reference: Sequence[Answer]) -> Quality:
    """Compare an engine with the answers of another."""
    pairs = [pair for one in reference for pair in await _compared(client, one)]
    divergences = [
        kl_divergence(ours.top, theirs.top) for ours, theirs in pairs if ours.top and theirs.top
    ]
    return Quality(
        equal=sum(ours.token == theirs.token for ours, theirs in pairs),
        total=len(pairs),
        divergence=sum(divergences) / len(divergences) if divergences else None,
    )


async def _compared(client: EngineClient, reference: Answer) -> list[tuple[Position, Position]]:
    pairs: list[tuple[Position, Position]] = []
    for _ in range(_PARTS_MAX):
        wanted = reference.positions[len(pairs) :]
        if not wanted:
            break
        done = [one.token for one in reference.positions[: len(pairs)]]
        found = await _greedy(client, [*reference.prompt, *done], len(wanted))
        for ours, theirs in zip(wanted, found, strict=True):
            pairs.append((ours, theirs))
            if ours.token != theirs.token:
                break
    return pairs


async def _greedy(client: EngineClient, prompt: Sequence[int], tokens: int) -> tuple[Position, ...]:
    body = {"prompt": list(prompt), "n_predict": tokens, **_GREEDY}
    content = orjson.loads(await post(client, "/completion", body))
    found = tuple(_positions(content))
    if len(found) != tokens:
        raise WorkloadFailed(f"/completion reported {len(found)} of {tokens} tokens")
    return found


def _positions(content: Mapping[str, Any]) -> Iterator[Position]:
    for one in content.get("completion_probabilities", ()):
        match one:
            case {"id": int(token), "top_logprobs": list(top)}:
                yield Position(token, {int(t["id"]): float(t["logprob"]) for t in top})
            case _:
                raise WorkloadFailed("/completion reported a token without probabilities")
