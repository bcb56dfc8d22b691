"""The pages that show the slots of all instances."""

from dataclasses import replace

import orjson
from fakes.proxy_harness import model_info
from fakes.slots import NOW_S, instance, reading, writing

from proxy.metrics.overview import engine_list, has_idle, overview
from proxy.router.model_queue import QueueStats


def test_instances_keep_their_order_whoever_is_admitted_last() -> None:
    instances = [instance(name=f"chat.{number}", slots=1) for number in (10, 2, 1)]
    slots = engine_list(instances, [model_info("chat")], NOW_S)
    assert [slot["instance"] for slot in slots] == ["chat.1", "chat.2", "chat.10"]


def test_the_overview_has_everything_of_the_models_it_is_about() -> None:
    code = replace(instance(name="code.1", slots=1), acceptance=2 / 3)
    instances = [code, instance(reading(), writing())]
    lines = {"chat": QueueStats(2, 1, 4.5, 9.0), "code": QueueStats(0, 0, 0.0, 0.0)}
    whole = orjson.loads(
        orjson.dumps(overview(instances, lines, [model_info("chat"), model_info("code")], NOW_S))
    )
    assert [len(whole["slots"]), whole["totals"]["slots"], whole["totals"]["active"]] == [4, 4, 2]
    chat, other = whole["instances"]
    assert (chat["instance"], chat["batch"], chat["conversations"], chat["prefill"]) == (
        "chat.1",
        "mixed",
        4,
        1,
    )
    assert (other["batch"], other["idle"]) == (None, 1)
    assert (chat["draft_acceptance"], other["draft_acceptance"]) == (None, 0.667)
    assert whole["queues"]["chat"] == {
        "interactive": 2,
        "batch": 1,
        "oldest_wait_s": 4.5,
        "expected_wait_s": 9.0,
    }
    less = overview(instances, lines, [model_info("code")], NOW_S)
    assert list(less["queues"]) == ["code"]  # type: ignore[call-overload]  # a page is objects
    assert orjson.loads(orjson.dumps(less))["totals"]["slots"] == 1


def test_tools_find_what_client_server_says_of_its_own_slots() -> None:
    busy, idle = engine_list([instance(reading(), slots=2)], [model_info("chat")], NOW_S)
    assert (busy["id"], busy["n_ctx"], busy["is_processing"]) == (0, 2048, True)
    assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_processed"]) == (50, 20)
    assert busy["n_prompt_tokens_cache"] == 10
    assert (idle["is_processing"], idle["model"], idle["state"]) == (False, "chat", "idle")
    assert has_idle([busy, idle])
    assert not has_idle([busy])


def test_nobody_learns_what_another_asks_or_who_it_is() -> None:
    instances, model_infos = [instance(reading(), writing())], [model_info("chat")]
    for page in (
        engine_list(instances, model_infos, NOW_S),
        overview(instances, {}, model_infos, NOW_S),
    ):
        text = orjson.dumps(page)
        for secret in (b"req-secret", b"somebody", b"inner-key", b"/run/x.sock"):
            assert secret not in text
