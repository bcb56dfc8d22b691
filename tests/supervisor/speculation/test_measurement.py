"""What guessing brings, weighed on an engine whose figures are made up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from aiohttp import web
from fakes.instance_harness import RecordingTraffic

from supervisor.engine_client.client import EngineClient
from supervisor.engine_client.endpoint import Endpoint
from supervisor.speculation.benefit import SpeculationBenefit, SpeculationConfig, Tokens
from supervisor.speculation.measurement import SpeculationMeasurement

OWN_SLOTS = SpeculationConfig(has_own_slots=True)


class Guesser:
    """An engine that takes 10 ms a step, 8 ms a guess, and accepts half of its guesses.

    Attributes:
        counted: What its counters say.
        named: The slots that requests named.
        asked: Set when an answer is asked for.
        was_left: Set when whoever asked has left.
        looks: Holds an item for each look at its counters.
        may_answer: Unset, answers wait.
    """

    def __init__(self) -> None:
        self.counted = Tokens()
        self.named: list[int | None] = []
        self.asked = asyncio.Event()
        self.was_left = asyncio.Event()
        self.looks: asyncio.Queue[None] = asyncio.Queue()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[EngineClient]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/slots", self._slots)
        app.router.add_post("/completion", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            async with EngineClient(Endpoint(path), "k") as client:
                yield client
        finally:
            await runner.cleanup()

    def answer(self, tokens: Tokens) -> None:
        self.counted += tokens

    async def _metrics(self, _request: web.Request) -> web.Response:
        said = {
            "tokens_predicted_total": self.counted.decoded,
            "spec_decode_num_draft_tokens_total": self.counted.drafted,
            "spec_decode_num_accepted_tokens_total": self.counted.accepted,
        }
        self.looks.put_nowait(None)
        return web.Response(text="\n".join(f"llamacpp:{name} {n}" for name, n in said.items()))

    async def _slots(self, _request: web.Request) -> web.Response:
        slots = [{"id": number, "n_ctx": 256, "is_processing": False} for number in range(3)]
        slots[2]["id_task"] = 7
        return web.json_response(slots)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.named.append(body.get("id_slot"))
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        decoded = body["n_predict"]
        tokens = Tokens(decoded) if decoded == 2 else Tokens(decoded, 40, 20)
        self.answer(tokens)
        duration_ms = (decoded - 1 - tokens.accepted) * 10 + tokens.drafted * 8
        said = {"predicted_n": decoded, "predicted_ms": duration_ms}
        if tokens.drafted:
            said |= {"draft_n": tokens.drafted, "draft_n_accepted": tokens.accepted}
        return web.Response(text=f"data: {json.dumps({'timings': said})}\n\n")


class Scene:
    """A weighing under way, and what it told."""

    def __init__(self, guesser: Guesser, drafting: SpeculationConfig | None) -> None:
        self.guesser = guesser
        self.traffic = RecordingTraffic()
        self.told: asyncio.Queue[SpeculationBenefit] = asyncio.Queue()
        self.weighing = SpeculationMeasurement(drafting, self.told.put_nowait)

    def answer(self, tokens: Tokens) -> None:
        """Have a client get an answer."""
        self.guesser.answer(tokens)
        self.traffic.now = replace(self.traffic.now, bytes_seen=self.traffic.now.bytes_seen + 1)


@asynccontextmanager
async def weighed(
    runtime: Path, guesser: Guesser, drafting: SpeculationConfig | None = OWN_SLOTS
) -> AsyncIterator[Scene]:
    scene = Scene(guesser, drafting)
    async with (
        asyncio.timeout(20),
        guesser.serve(runtime / "x.sock") as client,
        asyncio.TaskGroup() as group,
    ):
        task = group.create_task(scene.weighing.go_on(client, scene.traffic, "chat.0", 0.01))
        yield scene
        task.cancel()


async def test_answers_to_clients_alone_are_weighed_against_what_guesses_cost(
    runtime: Path,
) -> None:
    async with weighed(runtime, Guesser()) as scene:
        scene.answer(Tokens(1000, 1000, 500))
        verdict = await scene.told.get()
        assert verdict.tokens == Tokens(1000, 1000, 500)
        assert round(verdict.with_tps) == 77
        assert verdict.without_tps == 100
        assert verdict.is_slower
        assert scene.weighing.drafts
        assert scene.weighing.drafts.verdict == verdict
    assert set(scene.guesser.named) == {1}


async def test_a_verdict_is_told_again_only_when_it_is_another(runtime: Path) -> None:
    async with weighed(runtime, Guesser()) as scene:
        slow, quick = Tokens(1000, 1000, 500), Tokens(1000, 1000, 1000)
        scene.answer(slow)
        assert (await scene.told.get()).is_slower
        await scene.guesser.looks.get()
        for _ in range(2):
            scene.answer(slow)
            await scene.guesser.looks.get()
        scene.answer(quick)
        assert not (await scene.told.get()).is_slower
        assert scene.told.empty()


async def test_a_client_that_comes_is_made_way_for_and_the_trial_begins_anew(
    runtime: Path,
) -> None:
    guesser = Guesser()
    guesser.may_answer.clear()
    async with weighed(runtime, guesser, SpeculationConfig()) as scene:
        await guesser.asked.wait()
        scene.traffic.now = replace(scene.traffic.now, in_flight=1)
        await guesser.was_left.wait()
        assert guesser.named == [None]
        guesser.may_answer.set()
        scene.traffic.now = replace(scene.traffic.now, in_flight=0)
        scene.answer(Tokens(1000, 0, 0))
        assert not (await scene.told.get()).is_slower
    assert guesser.named == 13 * [None]


async def test_an_engine_that_does_not_guess_is_left_alone(runtime: Path) -> None:
    async with weighed(runtime, Guesser(), None) as scene:
        pass
    assert scene.weighing.drafts is None
    assert not scene.guesser.named
