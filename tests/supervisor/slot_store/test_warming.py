"""On the real engine: prompts are read ahead, and give way to requests."""

import asyncio
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S
from support.fleet_harness import LONG, UP, FleetHarness

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.shared_prefixes import shared_prefix
from proxy.router.lease import Activity
from proxy.upstream.upstream import Timings
from supervisor.engine.prompts import WarmPrompt, of_text, read
from supervisor.engine.states import State
from supervisor.engine.warmup import PrefillQueue, prefill
from supervisor.errors import SettingsInvalid, StartFailed
from supervisor.fleet import cache_commands


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "kind.txt"
    path.write_text("be kind " + LONG)
    return path


async def test_a_prompt_is_read_before_anybody_asks(
    tiny_model: Path, runtime: Path, prompt: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(prompt,))
    async with harness.up():
        (warmed,) = harness.emitted("prompt.prefilled")
        assert (warmed["prompt"], warmed["cached"]) == ("kind.txt", 0)
        system = {"role": "system", "content": prompt.read_text()}
        _, timings = await harness.ask([system, {"role": "user", "content": "hello"}])
    assert timings["cache_n"] > 0.9 * warmed["tokens"]


async def test_a_prompt_that_has_a_file_is_not_read_again(
    tiny_model: Path, runtime: Path, prompt: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(prompt,))
    prefix = shared_prefix("chat", read(prompt).body)
    assert prefix
    harness.traffic.fingerprints = lambda _, slots: {
        slot.id_slot: ConversationFingerprint((), prefix.blocks) for slot in slots
    }
    for _ in range(2):
        async with harness.up():
            pass
    assert len(harness.emitted("prompt.prefilled")) == 1
    (restored,) = harness.emitted("slots.restored")
    assert restored["slots"] == 1


async def test_prompts_take_no_slot_of_a_conversation_that_would_be_lost_with_it(
    tiny_model: Path, runtime: Path, prompt: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, {"parallel": 1, "cache-ram": 0}, prompts=(prompt,))
    async with harness.up():
        await harness.converse()
    async with harness.up():
        pass
    assert [event["slots"] for event in harness.emitted("slots.restored")] == [1]
    assert len(harness.emitted("prompt.prefilled")) == 1


async def test_with_cache_ram_conversations_and_prompts_are_all_there_after_a_start(
    tiny_model: Path, runtime: Path, prompt: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(prompt,))
    async with harness.up():
        conversations = [await harness.converse(f"{name} ") for name in ("one", "two")]
    async with harness.up():
        assert harness.emitted("slots.restored")[0]["slots"] == 2
        system = {"role": "system", "content": prompt.read_text()}
        for messages in (*conversations, [system, {"role": "user", "content": "hello"}]):
            _, timings = await harness.ask(messages)
            assert timings["cache_n"] > 600


async def test_there_are_never_more_prompts_than_slots(
    tiny_model: Path, runtime: Path, prompt: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(prompt,) * 5)
    async with harness.up():
        pass
    assert len(harness.emitted("prompt.prefilled")) == 2


@pytest.mark.parametrize("learns", [True, False])
async def test_learned_prompts_follow_those_of_the_settings_and_only_if_enabled(
    tiny_model: Path, runtime: Path, prompt: Path, *, learns: bool
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(prompt,), learns=learns)
    name = harness.planner.launches.learned.save("chat", dict(of_text("", "be brief").body))
    async with harness.up():
        pass
    prefilled = [event["prompt"] for event in harness.emitted("prompt.prefilled")]
    assert prefilled == (["kind.txt", name] if learns else ["kind.txt"])
    assert harness.planner.launches.learned.counts() == {"chat": 1}


async def test_a_prompt_that_is_not_there_is_reason_a_start_fails(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, prompts=(runtime / "none.txt",))
    instance = harness.replica.instance
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        serving = group.create_task(harness.fleet.serve())
        instance.start()
        facts = await instance.wait(frozenset({State.FAILED}))
        serving.cancel()
    assert facts.cause
    assert "none.txt" in facts.cause.sentence


async def test_a_prompt_that_the_engine_refuses_is_told_and_nothing_fails(
    tiny_model: Path, runtime: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"messages": [{"role": "user"}]}')
    harness = FleetHarness(runtime, tiny_model, prompts=(tmp_path / "bad.json",))
    async with harness.up():
        pass
    assert harness.emitted("prompt.rejected")[0]["prompt"] == "bad.json"


async def test_remaining_prompts_are_prefilled_while_no_client_waits(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    emitted = asyncio.Event()
    reading = PrefillQueue([of_text("x", LONG)], lambda _prompt, _found: emitted.set())
    async with harness.up(), harness.client() as client, asyncio.TaskGroup() as group:
        going_on = group.create_task(reading.resume(client, harness.traffic, "chat.0"))
        await emitted.wait()
        await going_on


async def test_a_request_ends_the_reading_of_a_prompt_which_is_begun_anew(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    begun: list[bool] = []

    async def slow_at_first(client: object, prompt: WarmPrompt) -> Timings:
        begun.append(True)
        if len(begun) == 1:
            harness.traffic.now = Activity(in_flight=1)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                harness.traffic.now = Activity()
        return Timings(0, 1, 0, 0, 0)

    monkeypatch.setattr("supervisor.engine.warmup.prefill", slow_at_first)
    emitted: list[str] = []
    reading = PrefillQueue([of_text("x", LONG)], lambda prompt, _found: emitted.append(prompt.name))
    async with harness.up(), harness.client() as client:
        await reading.resume(client, harness.traffic, "chat.0")
    assert (len(begun), emitted) == (2, ["x"])


async def test_a_cancelled_reading_frees_the_slot(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up(), harness.client() as client, asyncio.TaskGroup() as group:
        reading = group.create_task(prefill(client, of_text("x", LONG)))
        await asyncio.sleep(0)
        reading.cancel()
    assert harness.emitted("instance.exited")[-1]["code"] == 0


async def test_a_command_has_every_serving_instance_read_a_prompt(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, {"parallel": 1})
    down = await cache_commands.warm([harness.replica], of_text("x", LONG), harness.traffic)
    assert isinstance(down, StartFailed)
    async with harness.up():
        assert (await harness.replica.instance.wait(UP)).state is State.READY
        for known in (False, True):
            found = await cache_commands.warm(
                [harness.replica], of_text("x", LONG), harness.traffic
            )
            assert isinstance(found, list)
            assert (found[0].cached_tokens > 256) is known
        bad = await cache_commands.warm(
            [harness.replica], WarmPrompt("x", {"messages": [{}]}), harness.traffic
        )
    assert isinstance(bad, SettingsInvalid)


async def test_an_instance_that_leaves_is_not_waited_for(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up(), asyncio.TaskGroup() as group:
        harness.traffic.now = Activity(in_flight=1)
        reading = group.create_task(
            cache_commands.warm([harness.replica], of_text("x", LONG), harness.traffic)
        )
        await asyncio.sleep(0)
        harness.replica.instance.stop()
        assert isinstance(await reading, StartFailed)
        harness.traffic.now = Activity()
