"""The endpoints that list the slots of all instances."""

from dataclasses import replace

import orjson
import pytest
from support.proxy_harness import ProxyHarness, model_info
from support.slots import NOW_S, instance, reading, writing

from proxy.endpoints.slots import all_slots, engine_list, has_idle, overview, totals_of
from proxy.observe.metrics import Passes
from proxy.router.lease import LeaseStats
from proxy.router.queue import QueueStats


def test_each_slot_has_state_tokens_and_rate() -> None:
    first, second, third = all_slots([instance(reading(), writing())], NOW_S)
    assert (first.state, first.prompt_tokens, first.prompt_tokens_done) == ("prefill", 50, 30)
    assert (first.cached_tokens, first.age_s, first.tokens_per_second) == (10, 3.0, 0.0)
    assert (second.state, second.decoded_tokens, second.tokens_per_second) == ("decode", 21, 10.0)
    assert (third.state, third.age_s, third.prompt_tokens) == ("idle", 0.0, None)


def test_an_id_is_the_number_that_the_engine_has_for_a_slot() -> None:
    told = reading(id_slot=2)
    slots = all_slots([instance(writing(), told), instance(name="code.1", slots=1)], NOW_S)
    assert [(slot.instance, slot.id, slot.state, slot.is_confirmed) for slot in slots] == [
        ("chat.1", 0, "decode", False),  # the engine chose its slot
        ("chat.1", 1, "idle", True),
        ("chat.1", 2, "prefill", True),
        ("code.1", 0, "idle", True),
    ]


async def test_one_slot_is_found_by_its_number_and_instance(proxy: ProxyHarness) -> None:
    for name in ("chat.1", "chat.2"):
        fake = await proxy.fake(is_admitted=False)
        proxy.router.admit(replace(fake.upstream(), name=name, slots=2))
    statuses = {}
    for path in ("/slots/1", "/slots/1?instance=chat.2", "/slots/2?instance=chat.2", "/slots/x"):
        async with proxy.http.get(path) as response:
            statuses[path], page = response.status, await response.json()
            if response.status == 200:
                assert (page["id"], page["instance"], page["is_processing"]) == (1, "chat.2", False)
    assert list(statuses.values()) == [400, 200, 404, 404]
    async with proxy.http.get("/slots", params={"instance": "chat.2"}) as response:
        assert [slot["id"] for slot in await response.json()] == [0, 1]


def test_a_slot_whose_request_has_ended_is_active_while_the_engine_computes() -> None:
    ending = writing(phase="ending")
    cut = reading(phase="ending")
    slots = all_slots([instance(ending, cut)], NOW_S)
    assert [(slot.state, slot.is_ending) for slot in slots] == [
        ("decode", True),
        ("prefill", True),
        ("idle", False),
    ]
    assert totals_of(slots).num_active_slots == 2


def test_a_withdrawn_instance_has_only_its_active_slots() -> None:
    slots = all_slots([instance(writing(), is_admitted=False)], NOW_S)
    assert [slot.state for slot in slots] == ["decode"]


def test_the_first_token_has_no_rate() -> None:
    (slot, *_) = all_slots([instance(writing(1, first_token_at_s=NOW_S))], NOW_S)
    assert slot.tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("leases", "batch_type", "utilization"),
    [
        ([], "decode", 0.0),
        ([reading()], "prefill", 0.25),
        ([writing(), writing()], "decode", 0.5),
        ([reading(), writing(), writing(), reading()], "mixed", 1.0),
    ],
)
def test_totals(leases: list[LeaseStats], batch_type: str, utilization: float) -> None:
    """seed 001: BatchType Prefill, Decode, Mixed; SlotManager and SequenceBatch utilization.

    MicroBatch.update_batch_type.
    """
    totals = totals_of(all_slots([instance(*leases, slots=4)], NOW_S))
    assert (totals.batch_type, totals.utilization) == (batch_type, utilization)


@pytest.mark.parametrize("leases", [[], [reading()], [reading(), writing(), writing()]])
def test_slots_are_counted_by_state(leases: list[LeaseStats]) -> None:
    """seed 001: SlotManager.num_slots, num_idle_slots, num_active_slots."""
    totals = totals_of(all_slots([instance(*leases, slots=4)], NOW_S))
    assert (totals.num_slots, totals.num_active_slots) == (4, len(leases))
    assert totals.num_idle_slots == 4 - len(leases)


def test_sequences_are_counted_by_phase() -> None:
    """seed 001: SequenceBatch.num_prefill, num_decode."""
    totals = totals_of(all_slots([instance(reading(), writing(), writing(), slots=4)], NOW_S))
    assert (totals.num_prefill, totals.num_decode) == (1, 2)


@pytest.mark.parametrize(("count", "is_full"), [(0, False), (3, False), (4, True)])
def test_an_instance_is_full_when_each_slot_has_a_sequence(count: int, is_full: bool) -> None:  # noqa: FBT001 (a case)
    """seed 001: SequenceBatch.is_full, SequenceBatch.max_batch_size."""
    slots = all_slots([instance(*[writing()] * count, slots=4)], NOW_S)
    assert totals_of(slots).is_full is is_full


def test_a_slot_in_use_is_a_sequence_of_the_batch() -> None:
    """seed 001: SequenceBatchEntry.slot_id, position, tokens, is_prefill, decoding; BatchToken."""
    first, second, _ = all_slots([instance(reading(), writing())], NOW_S)
    assert [first.id, second.id] == [0, 1]
    assert [first.state == "prefill", second.state == "prefill"] == [True, False]
    position = first.prompt_tokens_done + first.decoded_tokens
    assert (position, (first.prompt_tokens or 0) - position) == (30, 20)
    assert second.prompt_tokens_done + second.decoded_tokens == 50 + 21


def test_the_rates_of_all_slots_are_added() -> None:
    """seed 001: SlotManager.aggregate_tokens_per_second."""
    slots = all_slots([instance(reading(), writing(), writing())], NOW_S)
    assert totals_of(slots).aggregate_tokens_per_second == 20.0


def test_the_latest_pass_has_tokens_of_prompts_and_one_of_each_answer() -> None:
    """seed 001: MicroBatch n_prompt_tokens, n_decode_tokens, len; BatchType of one pass."""
    busy = instance(reading(prompt_step=32), writing(), reading(prompt_step=16), slots=4)
    whole = overview([busy], {}, [model_info("chat")], NOW_S, {})
    (found,) = orjson.loads(orjson.dumps(whole))["instances"]
    assert found["latest_pass"] == {"n_prompt_tokens": 48, "n_decode_tokens": 1}
    assert [slot["pass_tokens"] for slot in orjson.loads(orjson.dumps(whole))["slots"]] == [
        32,
        1,
        16,
        0,
    ]


def test_totals_of_no_slots() -> None:
    """seed 001: SlotManager.utilization of no slots."""
    assert totals_of([]).utilization == 0.0


def test_instances_are_ordered_by_number() -> None:
    instances = [instance(name=f"chat.{number}", slots=1) for number in (10, 2, 1)]
    slots = engine_list(instances, [model_info("chat")], NOW_S)
    assert [slot["instance"] for slot in slots] == ["chat.1", "chat.2", "chat.10"]


def test_the_overview_covers_the_given_models() -> None:
    """seed 001: SlotManager.batch_slots, generating_slots, active_slots; BatchType."""
    code = replace(instance(name="code.1", slots=1), acceptance=2 / 3)
    instances = [code, instance(reading(), writing())]
    queues = {"chat": QueueStats(2, 1, 4.5, 9.0), "code": QueueStats(0, 0, 0.0, 0.0)}
    whole = orjson.loads(
        orjson.dumps(
            overview(
                instances,
                queues,
                [model_info("chat"), model_info("code")],
                NOW_S,
                {"chat.1": Passes(40, 240, 260)},
            )
        )
    )
    totals = whole["totals"]
    assert [len(whole["slots"]), totals["num_slots"], totals["num_active_slots"]] == [4, 4, 2]
    chat, other = whole["instances"]
    assert (chat["instance"], chat["batch_type"], chat["conversations"]) == ("chat.1", "mixed", 4)
    assert (chat["num_prefill"], chat["num_decode"], chat["batch_slots"]) == (1, 1, [1])
    assert (chat["passes"], chat["prompt_tokens_per_pass"]) == (40, 6.0)
    assert chat["decode_tokens_per_pass"] == 6.5
    assert (other["batch_type"], other["num_idle_slots"], other["is_full"]) == ("decode", 1, False)
    assert (other["passes"], other["prompt_tokens_per_pass"]) == (None, None)
    assert (chat["draft_acceptance"], other["draft_acceptance"]) == (None, 0.667)
    assert whole["queues"]["chat"] == {
        "interactive": 2,
        "batch": 1,
        "oldest_wait_s": 4.5,
        "expected_wait_s": 9.0,
    }
    less = overview(instances, queues, [model_info("code")], NOW_S, {})
    assert list(less["queues"]) == ["code"]  # type: ignore[call-overload]  # a page is objects
    assert orjson.loads(orjson.dumps(less))["totals"]["num_slots"] == 1


def test_slots_have_the_members_of_llama_server() -> None:
    busy, idle = engine_list([instance(reading(), slots=2)], [model_info("chat")], NOW_S)
    assert (busy["id"], busy["n_ctx"], busy["is_processing"]) == (0, 2048, True)
    assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_processed"]) == (50, 20)
    assert busy["n_prompt_tokens_cache"] == 10
    assert (idle["is_processing"], idle["model"], idle["state"]) == (False, "chat", "idle")
    assert (busy["speculative"], idle["speculative"]) == (False, False)
    assert has_idle([busy, idle])
    assert not has_idle([busy])


def test_nothing_identifies_a_request_or_its_client() -> None:
    instances, model_infos = [instance(reading(), writing())], [model_info("chat")]
    for page in (
        engine_list(instances, model_infos, NOW_S),
        overview(instances, {}, model_infos, NOW_S, {}),
    ):
        text = orjson.dumps(page)
        for secret in (b"req-secret", b"somebody", b"inner-key", b"/run/x.sock"):
            assert secret not in text
