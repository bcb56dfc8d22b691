"""One play of a capture, and the comparison of its answers with others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from supervisor.bench.instance import private_instance
from supervisor.engine_client.client import EngineClient
from supervisor.flags.plan import Plan
from supervisor.host.paths import Directories
from supervisor.replay.comparison import Comparison, compare
from supervisor.replay.played_request import PlayedRequest
from supervisor.replay.player import Played, Player, PlayOptions


@dataclass(frozen=True, slots=True)
class Target:
    """What plays: `client` makes a client; `slots` may be chosen, 0: none."""

    client: Callable[[], EngineClient]
    model: str
    slots: int


@dataclass(frozen=True, slots=True)
class Play:
    """What the requests got, in their order, and how it compares where there was a baseline."""

    played: tuple[Played, ...]
    comparisons: tuple[Comparison, ...]

    def texts(self, requests: Sequence[PlayedRequest]) -> dict[int, str]:
        """Return the answers by the numbers of their requests."""
        pairs = zip(requests, self.played, strict=True)
        return {ours.captured.number: one.text for ours, one in pairs if one.failure is None}


@asynccontextmanager
async def own_engine(plan: Plan, directories: Directories) -> AsyncIterator[Target]:
    """Start an engine for the block; raises as `private_instance`."""
    async with private_instance(plan, directories) as instance:
        yield Target(instance.client, plan.model, plan.slots if plan.has_own_slots else 0)


async def play(
    target: Target,
    requests: Sequence[PlayedRequest],
    expected: Mapping[int, str],
    *,
    concurrency: int,
    is_as_recorded: bool,
    on_answer: Callable[[int], None],
) -> Play:
    """Play all requests; compare the answers with those that are expected of some.

    Raises:
        EngineUnreachable, WorkloadFailed: The engine is gone, or refuses to tokenise.
    """
    options = PlayOptions(target.model, target.slots, concurrency, is_as_recorded)
    played = await Player(requests, target.client, options, on_answer).play()
    comparisons = []
    async with target.client() as client:
        for request, one in zip(requests, played, strict=True):
            number = request.captured.number
            if one.failure is None and number in expected:
                difference = await compare(client, target.model, expected[number], one.text)
                comparisons.append(Comparison(number, difference))
    return Play(tuple(played), tuple(comparisons))
