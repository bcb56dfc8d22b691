"""One run: the conversations of many clients on some nodes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proxy.errors import ProxyError, UpstreamConnectFailed, UpstreamFailed
from proxy.request.models import ModelInfo, ModelNames, OnLoad, do_nothing_on_load
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Node, Upstream
from scripts.simulation.engine import DECODE_TPS, PREFILL_TPS, SLOTS, Engine, NodeLost
from scripts.simulation.processor_time import ProcessorTimes
from scripts.simulation.workload import MODEL, Turn, turns

# Conversations begin as fast as fills so much of all slots on average, with warm caches.
_LOAD: Final = 0.6
_REQUEST_S: Final = 110 / DECODE_TPS * 1.2 + 400 / PREFILL_TPS
_TURNS: Final = 2.6
# A lost node comes back with an empty cache.
_LOST_S: Final = 60.0
_BLOCKS_PER_NODE: Final = 10_000
_BLOCKS_MIN: Final = 200_000
_REPLY: Final = {"role": "assistant", "content": ""}


@dataclass(frozen=True, slots=True)
class Case:
    """The simulated case.

    Attributes:
        loses_node: Whether a node is lost half-way.
    """

    nodes: int
    conversations: int
    seed: int
    policy: Policy = "affinity"
    loses_node: bool = False


@dataclass(slots=True)
class Facts:
    """The fate of the requests; the same for each run of a case.

    Attributes:
        prefilled: Prompt tokens computed.
        ideal: As many as one machine of infinite memory would compute.
        repeated: Computed because the node that had them was lost.
        retried: Begun again before their first token, on another node.
        cut: Ended by the loss after their first token; their clients repeated them.
        failed: Without a response.
        work: Tokens computed and generated, by node.
        slowdown: Time to the response as a multiple of the time without a wait, by client.
        waits_s: In the queue, of each request.
    """

    requests: int = 0
    answered: int = 0
    prefilled: int = 0
    ideal: int = 0
    repeated: int = 0
    retried: int = 0
    cut: int = 0
    failed: int = 0
    virtual_s: float = 0.0
    work: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slowdown: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_s: list[float] = field(default_factory=list)


class Run:
    """One case; `main` runs on a loop of virtual time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.facts = Facts()
        self.times = ProcessorTimes()
        self._rng = random.Random(f"{case.seed} {case.nodes}")  # noqa: S311 (a workload)
        self._engines: dict[str, Engine] = {}
        self._lost: Engine | None = None
        self._systems: set[int] = set()
        self._back = asyncio.Event()
        blocks = max(_BLOCKS_MIN, _BLOCKS_PER_NODE * case.nodes)
        settings = ProxySettings(
            policy=case.policy, queue_max=100_000, prefix_index_max_blocks=min(blocks, 10**7)
        )
        self.router = Router(settings, clock=lambda: asyncio.get_running_loop().time())

    async def main(self) -> None:
        for number in range(self.case.nodes):
            self._admit(f"node-{number}")
        began_s = asyncio.get_running_loop().time()
        rate = _LOAD * self.case.nodes * SLOTS / _REQUEST_S / _TURNS
        with self.times.counted():
            async with asyncio.TaskGroup() as group:
                for number in range(self.case.conversations):
                    await asyncio.sleep(self._rng.expovariate(rate))
                    group.create_task(self._converse(number))
                    if self.case.loses_node and number == self.case.conversations // 2:
                        group.create_task(self._lose())
        self.facts.virtual_s = asyncio.get_running_loop().time() - began_s

    def _admit(self, name: str, run: int = 0) -> None:
        self._engines[name] = Engine(self._rng.uniform(0.9, 1.1))
        node = Node(name, MODEL, is_spare=False)
        self.router.admit(Upstream(name, MODEL, SLOTS, None, name, 8080, f"{run}", node=node))

    async def _lose(self) -> None:
        """Lose the node that has most to do."""
        name = max(self._engines, key=lambda engine: (self.router.count_in_flight(engine), engine))
        self._lost = self._engines[name]
        self._back.clear()
        self._lost.lose()
        self.router.withdraw(name)
        await asyncio.sleep(_LOST_S)
        self._admit(name, run=1)
        self._back.set()

    async def _converse(self, number: int) -> None:
        for turn in turns(self.case.seed, number):
            self._count(turn)
            began_s = asyncio.get_running_loop().time()
            while not await self._is_answered(turn):
                self.facts.cut += 1
            if turn.request.priority == "interactive":
                took_s = asyncio.get_running_loop().time() - began_s
                alone_s = turn.answer_tokens / DECODE_TPS
                self.facts.slowdown[turn.request.client].append(took_s / alone_s)
            await asyncio.sleep(turn.pause_s)

    def _count(self, turn: Turn) -> None:
        known = turn.system_tokens if turn.system in self._systems else 0
        self._systems.add(turn.system)
        self.facts.requests += 1
        self.facts.ideal += turn.tokens - (turn.history_tokens or known)

    async def _is_answered(self, turn: Turn) -> bool:
        """Return False where the response was cut after its first token."""
        avoid: tuple[str, ...] = ()
        try:
            while True:
                try:
                    await self._attempt(turn, avoid)
                except UpstreamConnectFailed as error:
                    if avoid:
                        raise
                    self.facts.retried += 1
                    avoid = (error.instance,)
                else:
                    self.facts.answered += 1
                    return True
        except UpstreamFailed:
            return False
        except ProxyError:
            self.facts.failed += 1
            return True

    async def _attempt(self, turn: Turn, avoid: tuple[str, ...]) -> None:
        async with self.router.lease(turn.request, avoid, self.ensure_ready) as lease:
            name = lease.upstream.name
            self.facts.waits_s.append(lease.queued_s)
            try:
                timings = await self._engines[name].answer(turn, lease.progress.count_token)
            except NodeLost:
                if lease.progress.decoded:
                    raise UpstreamFailed(f"{name} is lost") from None
                raise UpstreamConnectFailed(name, "is lost") from None
            self.router.finish(lease, Completion(timings, _REPLY))
        self.facts.prefilled += timings.prompt_tokens
        self.facts.work[name] += timings.prompt_tokens + timings.decoded_tokens
        if self._lost:
            self.facts.repeated += max(0, self._lost.take(turn) - timings.cached_tokens)

    # The model loader: here, it waits for a node to come back.

    def models(self) -> Sequence[ModelInfo]:
        return ()

    def names(self) -> ModelNames:
        return ModelNames(())

    async def ensure_ready(self, model: str, on_load: OnLoad = do_nothing_on_load) -> None:
        del model, on_load
        await self._back.wait()
