"""Agents with tool calls, and clients of single turns, on the real router in virtual time.

Engines only count: each computes one prompt after the other in passes of up to 512 tokens, in which
its other slots decode one token each, and has no cache beyond its slots.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from dataclasses import dataclass, field, replace
from typing import Any, Final

from support.requests import ask, upstream, with_tools
from support.virtual_time import run_in_virtual_time

from proxy.cache.prompt import BLOCK_TOKENS, NO_OUTLINE
from proxy.request.request import Priority, ProxyRequest
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Timings
from scripts.simulation.workload import SimulatedPrompt

_PASS_TOKENS: Final = 512
# A pass over another sequence takes this much longer.
_PASS_SHARE: Final = 0.1
_NO_HASH: Final = hashlib.blake2b(digest_size=8)
# By name, the usual time of a tool.
TOOLS_S: Final = {"read": 0.4, "search": 1.5, "test": 6.0}


def tool_s(rng: random.Random, tool: str) -> float:
    """Return how long a call of a tool takes: 0.2 to 20 s."""
    return min(20.0, max(0.2, rng.lognormvariate(0, 0.5) * TOOLS_S[tool]))


@dataclass(frozen=True, slots=True)
class AgentsCase:
    """What is simulated; 8 agents and 2 clients of single turns share 4 slots of 2 engines."""

    hold_max_s: float
    seed: int = 1
    agents: int = 8
    single_clients: int = 2
    instances: int = 2
    slots: int = 2
    prefill_tps: float = 1500.0
    decode_tps: float = 50.0


@dataclass(slots=True)
class AgentsOutcome:
    sessions_s: list[float] = field(default_factory=list)
    singles_s: list[float] = field(default_factory=list)
    computed: int = 0
    new: int = 0
    longest_wait_s: float = 0.0
    held_s: float = 0.0
    kept: int = 0


class _Engine:
    def __init__(self, case: AgentsCase) -> None:
        self._case = case
        self._slots: dict[int, tuple[object, int]] = {}
        self._prompts: list[list[int]] = []
        self._answers: list[list[int]] = []
        self._passed = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        while True:
            if not (self._prompts or self._answers):
                self._wanted.clear()
                await self._wanted.wait()
            pass_s = 0.0
            prompts = self._prompts[:1]
            for prompt in prompts:
                tokens = min(_PASS_TOKENS, prompt[0])
                prompt[0] -= tokens
                pass_s += tokens / self._case.prefill_tps
            if self._answers:
                pass_s += (1 + _PASS_SHARE * (len(self._answers) - 1)) / self._case.decode_tps
            await asyncio.sleep(pass_s)
            for answer in self._answers:
                answer[0] -= 1
            self._prompts = [prompt for prompt in self._prompts if prompt[0] > 0]
            self._answers = [answer for answer in self._answers if answer[0] > 0]
            self._passed.set()
            self._passed = asyncio.Event()

    async def answer(self, lease: Lease, conversation: object, tokens: int, more: int) -> Timings:
        assert lease.slot
        clock, number = asyncio.get_running_loop().time, lease.slot.id_slot
        holder, held = self._slots.pop(number, (None, 0))
        cached = min(held, tokens - 1) if holder is conversation else 0
        began_s = clock()
        await self._until_done(self._prompts, tokens - cached)
        first_s = clock()
        lease.progress.count_token()
        await self._until_done(self._answers, more)
        self._slots[number] = conversation, tokens + more
        prompt_ms, decode_ms = 1000 * (first_s - began_s), 1000 * (clock() - first_s)
        return Timings(cached, tokens - cached, prompt_ms, more, decode_ms)

    async def _until_done(self, work: list[list[int]], tokens: int) -> None:
        own = [tokens]
        work.append(own)
        self._wanted.set()
        while own[0] > 0:
            await self._passed.wait()


class _Run:
    def __init__(self, case: AgentsCase) -> None:
        self._case = case
        self.outcome = AgentsOutcome()
        settings = ProxySettings(slot_hold_max_s=case.hold_max_s)
        self.router = Router(settings, clock=lambda: asyncio.get_running_loop().time())

    async def main(self) -> None:
        case = self._case
        self._engines = {f"chat.{at}": _Engine(case) for at in range(1, case.instances + 1)}
        for name in self._engines:
            self.router.admit(replace(upstream(name, slots=case.slots), can_name_slots=True))
        async with asyncio.TaskGroup() as group:
            engines = [group.create_task(engine.run()) for engine in self._engines.values()]
            agents = [group.create_task(self._agent(number)) for number in range(case.agents)]
            singles = [
                group.create_task(self._singles(number)) for number in range(case.single_clients)
            ]
            await asyncio.wait(agents)
            for task in (*singles, *engines):
                task.cancel()
        holds = self.router.queues["chat"].holds
        self.outcome.held_s, self.outcome.kept = holds.held_s, holds.counts["kept"]

    async def _agent(self, number: int) -> None:
        rng = random.Random(f"{self._case.seed} agent {number}")  # noqa: S311 (a workload)
        began_s = asyncio.get_running_loop().time()
        history = _History(rng, f"agent-{number}", rng.randint(800, 1600))
        for _ in range(rng.randint(12, 40)):
            answer_tokens, tool = rng.randint(20, 60), rng.choice(list(TOOLS_S))
            await self._ask(history, answer_tokens, tool)
            await asyncio.sleep(tool_s(rng, tool))
            history.grow(rng.randint(40, 160))
        self.outcome.sessions_s.append(asyncio.get_running_loop().time() - began_s)

    async def _singles(self, number: int) -> None:
        rng = random.Random(f"{self._case.seed} single {number}")  # noqa: S311 (as above)
        while True:
            await asyncio.sleep(rng.expovariate(1 / 6))
            began_s = asyncio.get_running_loop().time()
            history = _History(rng, f"single-{number}", rng.randint(60, 300))
            await self._ask(history, rng.randint(20, 60), "")
            self.outcome.singles_s.append(asyncio.get_running_loop().time() - began_s)

    async def _ask(self, history: _History, answer_tokens: int, tool: str) -> None:
        outcome, reply = self.outcome, dict[str, Any](role="assistant", content="")
        if tool:
            reply["tool_calls"] = [{"function": {"name": tool}}]
        async with self.router.lease(history.request()) as lease:
            outcome.longest_wait_s = max(outcome.longest_wait_s, lease.queued_s)
            engine = self._engines[lease.upstream.name]
            timings = await engine.answer(lease, history, history.tokens, answer_tokens)
            self.router.finish(lease, Completion(timings, reply))
        outcome.computed += timings.prompt_tokens
        outcome.new += history.tokens - history.known
        history.end_turn(answer_tokens)


class _History:
    """A conversation's prompt so far: hashes without a text."""

    def __init__(self, rng: random.Random, client: str, tokens: int) -> None:
        self._rng = rng
        self._client = client
        self.tokens, self.known = tokens, 0
        self._hashes, self._blocks = [rng.getrandbits(64)] * 2, array("Q")

    def grow(self, tokens: int) -> None:
        self.tokens += tokens

    def request(self, priority: Priority = "interactive") -> ProxyRequest:
        count = self.tokens // BLOCK_TOKENS - len(self._blocks)
        self._blocks.extend(self._rng.getrandbits(64) for _ in range(count))
        self._hashes = [*self._hashes[-30:], self._rng.getrandbits(64)]
        self._reply_hash = self._rng.getrandbits(64)
        prompt = SimulatedPrompt(
            tuple(self._blocks),
            tuple(self._hashes),
            self.tokens,
            self._hashes[1],
            1,
            NO_OUTLINE,
            (),
            0,
            _NO_HASH,
            0,
            self._reply_hash,
        )
        request = ask("", client=self._client, priority=priority, queue_timeout_s=3600)
        return replace(with_tools(request), prompt=prompt)

    def end_turn(self, answer_tokens: int) -> None:
        self._hashes.append(self._reply_hash)
        self.tokens += answer_tokens
        self.known = self.tokens


def simulate(case: AgentsCase) -> AgentsOutcome:
    run = _Run(case)
    run_in_virtual_time(run.main())
    return run.outcome
