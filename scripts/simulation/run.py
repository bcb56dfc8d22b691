"""One run: requests for some nodes, through one front or several, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Literal

from xxhash import xxh3_64_intdigest

from proxy.cache.remote_prefixes import PrefixDigests
from proxy.errors import ProxyError, UpstreamConnectFailed, UpstreamFailed
from proxy.request.models import ModelInfo, ModelNames, OnLoad, do_nothing_on_load
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.upstream import Node, Timings, Upstream
from scripts.simulation.engine import SMALL, Engine, Machine, NodeLost
from scripts.simulation.nodes import DigestCosts, SimulatedNode, monitors_of, node_settings
from scripts.simulation.processor_time import ProcessorTimes
from scripts.simulation.workload import MODEL, Turn, prompts_of_groups, turns

# Conversations begin as fast as fills so much of all slots on average, with warm caches.
_LOAD: Final = 0.6
_TURNS: Final = 2.6
# A lost node comes back with an empty cache.
_LOST_S: Final = 60.0
_BLOCKS_PER_NODE: Final = 10_000
_BLOCKS_MIN: Final = 200_000
_REPLY: Final = {"role": "assistant", "content": ""}

Rule = Policy | Literal["oracle", "rendezvous"]
OnFirstToken = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """The simulated case.

    Attributes:
        stages: Of llm-d's benchmark, which takes the place of conversations.
        rate: Multiplies the rates of these stages.
        policy: The oracle sends each request where its first token comes first; it knows all caches
            and all times. Rendezvous hashing of a conversation's first message needs no knowledge
            but which nodes have a free slot.
        loses_node: Whether a node is lost half-way.
        fronts: Each turn comes through one of them by chance.
        is_sticky: All turns of a conversation come through the same front.
        has_digests: Whether fronts read which conversations the nodes hold.
    """

    nodes: int
    conversations: int
    seed: int
    stages: Sequence[tuple[int, int]] = ()
    policy: Rule = "affinity"
    loses_node: bool = False
    fronts: int = 1
    is_sticky: bool = False
    has_digests: bool = False
    machine: Machine = SMALL
    rate: float = 1.0


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
        returned: Turns that continue a conversation which some node holds; found: by that node.
        work: Tokens computed and generated, by node.
        slowdown: Time to the response as a multiple of the time without a wait, by client.
        waits_s: In the queue, of each request.
        first_tokens_s: Time from a request to its first token, by the rate of its stage.
        stages_s: Time from the first request of a stage to its last answer, by rate.
    """

    requests: int = 0
    answered: int = 0
    prefilled: int = 0
    ideal: int = 0
    repeated: int = 0
    retried: int = 0
    cut: int = 0
    failed: int = 0
    returned: int = 0
    found: int = 0
    virtual_s: float = 0.0
    work: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slowdown: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_s: list[float] = field(default_factory=list)
    first_tokens_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    stages_s: dict[int, float] = field(default_factory=dict)


class Run:
    """One case; `main` runs on a loop of virtual time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.facts = Facts()
        self.times = ProcessorTimes()
        self.digest_costs = DigestCosts()
        self._rng = random.Random(f"{case.seed} {case.nodes}")  # noqa: S311 (a workload)
        self._engines: dict[str, Engine] = {}
        self._holders: dict[int, str] = {}  # The node that answered the latest turn.
        self._lost: Engine | None = None
        self._systems: set[int] = set()
        self._back = asyncio.Event()
        self._stage = 0
        self._digests: dict[str, PrefixDigests] = {}
        blocks = max(_BLOCKS_MIN, _BLOCKS_PER_NODE * case.nodes)
        self._settings = ProxySettings(
            policy="affinity" if case.policy in {"oracle", "rendezvous"} else case.policy,
            queue_max=100_000,
            prefix_index_max_blocks=min(blocks, 10**7),
        )
        self.fronts = [Router(self._settings, clock=_now_s) for _ in range(case.fronts)]

    async def main(self) -> None:
        for number in range(self.case.nodes):
            self._add_engine(f"node-{number}/{MODEL}")
        async with AsyncExitStack() as stack:
            stack.enter_context(self.times.counted())
            if self.case.fronts > 1 or self.case.has_digests:
                group = await stack.enter_async_context(asyncio.TaskGroup())
                tasks = [await self._watch_nodes(front, group) for front in self.fronts]
                stack.callback(lambda: [task.cancel() for task in tasks])
            else:
                for name in self._engines:
                    self._admit(name)
            began_s = _now_s()
            await (self._serve_stages() if self.case.stages else self._serve_conversations())
            self.facts.virtual_s = _now_s() - began_s

    def _add_engine(self, name: str) -> None:
        self._engines[name] = Engine(self.case.machine, self._rng.uniform(0.9, 1.1))

    def _admit(self, name: str, run: int = 0) -> None:
        node = Node(name, MODEL, is_spare=False)
        slots = self.case.machine.slots
        upstream = Upstream(name, MODEL, slots, None, name, 8080, f"{run}", node=node)
        self.fronts[0].admit(upstream)

    async def _watch_nodes(self, front: Router, group: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Let a front find all nodes, and read their digests until the task is cancelled."""
        monitors = monitors_of(front, self._settings)
        nodes = []
        for number, name in enumerate(self._engines):
            digests = self._digests.setdefault(name, PrefixDigests(_now_s))
            known = digests if self.case.has_digests else None
            node, settings = name.partition("/")[0], node_settings(number)
            slots, costs = self.case.machine.slots, self.digest_costs
            nodes.append(SimulatedNode(node, settings, slots=slots, digests=known, costs=costs))
        monitors.replace("nodes", nodes, "")
        task = group.create_task(monitors.tasks.serve())
        for monitor in monitors:
            await monitor.checked.wait()
        return task

    # What comes.

    async def _serve_conversations(self) -> None:
        machine = self.case.machine
        request_s = 110 / machine.decode_tps * 1.2 + 400 / machine.prefill_tps
        rate = _LOAD * self.case.nodes * machine.slots / request_s / _TURNS
        async with asyncio.TaskGroup() as group:
            for number in range(self.case.conversations):
                await asyncio.sleep(self._rng.expovariate(rate))
                group.create_task(self._converse(number))
                if self.case.loses_node and number == self.case.conversations // 2:
                    group.create_task(self._lose())

    async def _converse(self, number: int) -> None:
        for turn in turns(self.case.seed, number):
            self._count(turn)
            began_s = _now_s()
            await self._ask(turn)
            if turn.request.priority == "interactive":
                alone_s = turn.answer_tokens / self.case.machine.decode_tps
                self.facts.slowdown[turn.request.client].append((_now_s() - began_s) / alone_s)
            await asyncio.sleep(turn.pause_s)
        self._holders.pop(number, None)

    def _count(self, turn: Turn) -> None:
        known = turn.system_tokens if turn.system in self._systems else 0
        self._systems.add(turn.system)
        self.facts.ideal += turn.tokens - (turn.history_tokens or known)

    async def _serve_stages(self) -> None:
        """Serve llm-d's benchmark: each stage begins when all requests of the last have ended."""
        prompts, sent = prompts_of_groups(self.case.seed), 0
        rate = self.case.rate * self.case.nodes / 8
        for number, (per_s, seconds) in enumerate(self.case.stages):
            self._stage = per_s if number else 0
            began_s = _now_s()
            async with asyncio.TaskGroup() as group:
                for _ in range(per_s * seconds):
                    await asyncio.sleep(self._rng.expovariate(per_s * rate))
                    group.create_task(self._ask(prompts[sent % len(prompts)]))
                    sent += 1
            self.facts.stages_s[self._stage] = _now_s() - began_s

    async def _lose(self) -> None:
        """Lose the node that has most to do."""
        front = self.fronts[0]
        name = max(self._engines, key=lambda engine: (front.count_in_flight(engine), engine))
        self._lost = self._engines[name]
        self._back.clear()
        self._lost.lose()
        front.withdraw(name)
        await asyncio.sleep(_LOST_S)
        self._add_engine(name)
        self._admit(name, run=1)
        self._back.set()

    # Its way to an engine.

    async def _ask(self, turn: Turn) -> None:
        """Send a request until it is answered."""
        self.facts.requests += 1
        began_s, stage = _now_s(), self._stage
        first_tokens_s: list[float] = []

        def note_first_token() -> None:
            first_tokens_s.append(_now_s() - began_s)

        if name := self._chosen(turn, began_s):
            timings = await self._engines[name].answer(turn, note_first_token)
            self._note_answer(name, turn, timings)
        else:
            number = turn.conversation if self.case.is_sticky else self._rng.getrandbits(32)
            front = self.fronts[number % len(self.fronts)]
            while not await self._is_answered(front, turn, note_first_token):
                self.facts.cut += 1
        self.facts.first_tokens_s[stage] += first_tokens_s[-1:]

    def _chosen(self, turn: Turn, now_s: float) -> str | None:
        """Return the node that a rule without a front chooses."""
        engines = self._engines
        match self.case.policy:
            case "oracle":
                return min(engines, key=lambda name: engines[name].plan(turn, now_s).first_token_s)
            case "rendezvous":
                seed = turn.conversation

                def place(name: str) -> tuple[bool, int]:
                    return engines[name].has_free_slot(now_s), xxh3_64_intdigest(
                        name.encode(), seed
                    )

                return max(engines, key=place)
            case _:
                return None

    async def _is_answered(self, front: Router, turn: Turn, on_first_token: OnFirstToken) -> bool:
        """Return False where the response was cut after its first token."""
        avoid: tuple[str, ...] = ()
        try:
            while True:
                try:
                    await self._attempt(front, turn, avoid, on_first_token)
                except UpstreamConnectFailed as error:
                    if avoid:
                        raise
                    self.facts.retried += 1
                    avoid = (error.instance,)
                else:
                    return True
        except UpstreamFailed:
            return False
        except ProxyError:
            self.facts.failed += 1
            return True

    async def _attempt(
        self, front: Router, turn: Turn, avoid: tuple[str, ...], on_first_token: OnFirstToken
    ) -> None:
        async with front.lease(turn.request, avoid, self.ensure_ready) as lease:
            name = lease.upstream.name
            self.facts.waits_s.append(lease.queued_s)

            def note_first_token() -> None:
                lease.progress.count_token()
                on_first_token()

            try:
                timings = await self._engines[name].answer(turn, note_first_token)
            except NodeLost:
                if lease.progress.decoded:
                    raise UpstreamFailed(f"{name} is lost") from None
                raise UpstreamConnectFailed(name, "is lost") from None
            front.finish(lease, Completion(timings, _REPLY))
        if digests := self._digests.get(name):
            prompt = turn.request.prompt
            assert prompt  # noqa: S101 (for the type)
            digests.note("engine", MODEL, "", prompt, _REPLY)
        self._note_answer(name, turn, timings)

    def _note_answer(self, name: str, turn: Turn, timings: Timings) -> None:
        self.facts.answered += 1
        self.facts.prefilled += timings.prompt_tokens
        self.facts.work[name] += timings.prompt_tokens + timings.decoded_tokens
        if holder := self._holders.get(turn.conversation):
            self.facts.returned += 1
            self.facts.found += holder == name
        self._holders[turn.conversation] = name
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


def _now_s() -> float:
    return asyncio.get_running_loop().time()
