"""The output of `corral status`."""

from dataclasses import replace
from typing import Any, Literal

from support import top_samples

from supervisor.cli.status import render
from supervisor.daemon.control_messages import (
    BatchQueueStatus,
    DraftStatus,
    IdleStatus,
    InstanceStatus,
    ModelStatus,
    NodeStatus,
    TrialNote,
    WaitStatus,
    WeightStatus,
)

STATUS = top_samples.STATUS


def node(name: str, reason: str | None = None, *models: str) -> NodeStatus:
    state = "down" if reason else "up"
    return NodeStatus(
        name=name,
        state=state,
        reason=reason,
        url=f"http://{name}:8080",
        models=list(models),
        slots=0 if reason else 4,
        slots_busy=0 if reason else 1,
        received_bytes=0,
    )


def instance(**changes: Any) -> InstanceStatus:
    return top_samples.instance(**{"name": "chat.0", **changes})


def model(
    *instances: InstanceStatus,
    not_persisted_reason: str | None = None,
    waiting: WaitStatus | None = None,
    idle: IdleStatus | None = None,
    engine_tools: Literal["off", "local", "network"] = "off",
) -> ModelStatus:
    return ModelStatus(
        name="chat",
        state="loaded",
        reason=None,
        preload=True,
        aliases=[],
        path="/models/chat.gguf",
        profile="base",
        slots=4,
        ctx_size=4096,
        trial=None,
        not_persisted_reason=not_persisted_reason,
        engine_tools=engine_tools,
        chats=True,
        changed={},
        adapted=[],
        reduced=[],
        waiting=waiting,
        idle=idle,
        instances=[*instances],
    )


def shown(*instances: InstanceStatus, waiting: WaitStatus | None = None) -> str:
    return render(replace(STATUS, models=[model(*instances, waiting=waiting)]))


def test_a_wait_for_memory_shows_its_time_and_the_models_to_unload() -> None:
    first = WaitStatus(place=1, requests=3, wait_s=12.0, leaving=["a", "b"], rule=None)
    text = shown(instance(state="stopped"), waiting=first)
    assert "chat: 3 waiting for memory, 12s so far; no new requests for a and b" in text
    second = WaitStatus(place=2, requests=0, wait_s=1.0, leaving=[], rule="a rule")
    text = shown(instance(state="stopped"), waiting=second)
    assert text.endswith(
        "chat: a command is waiting until others are unloaded: a rule, 1s so far, place 2"
    )


def test_the_rules_of_groups_are_shown() -> None:
    rule = "at most 1 of chat, code may be loaded at the same time (groups.big)"
    assert rule in render(replace(STATUS, groups=[rule])).splitlines()


def test_the_time_of_an_unload_is_shown() -> None:
    def idle(
        limit_s: float | None, in_s: float | None, origin: Literal["ttl_s", "keep_alive"]
    ) -> str:
        found = IdleStatus(limit_s=limit_s, unload_in_s=in_s, origin=origin)
        lines = render(replace(STATUS, models=[model(instance(), idle=found)])).splitlines()
        return next((line for line in lines if line.startswith("chat: ")), "")

    assert idle(900.0, 65.0, "ttl_s") == "chat: unloaded in 1m 05s without a request (ttl_s)"
    assert idle(300.0, None, "keep_alive") == (
        "chat: unloaded 5m 00s after its last request (keep_alive)"
    )
    assert idle(None, None, "keep_alive") == "chat: stays loaded (keep_alive)"
    assert not idle(None, None, "ttl_s")


def test_an_instance_that_is_given_up_says_how_it_starts_again() -> None:
    error = {"code": "memory_fault", "message": "it crashed", "hint": None, "log": None}
    again = "  it is not restarted any more; `corral start chat` starts it again"
    assert shown(instance(state="failed", error=error)).endswith(f"chat.0: it crashed\n{again}")
    assert "restarted" not in shown(instance(state="starting", error=error))


DRAFT = DraftStatus(drafted=200, accepted=76, acceptance=0.38, path=None)


def test_draft_acceptance_is_shown() -> None:
    assert "chat.0: accepts 38% of 200 drafted tokens" in shown(instance(draft=DRAFT)).splitlines()


def test_draft_acceptance_is_hidden_where_nothing_was_drafted() -> None:
    for draft in (None, replace(DRAFT, acceptance=None)):
        assert "draft" not in shown(instance(draft=draft))


def test_the_instance_of_a_trial_is_named() -> None:
    found = model(instance(), instance(name="chat.1"))
    found.trial = TrialNote("low-memory", is_canary=False, share=0.025, instance="chat.1")
    text = render(replace(STATUS, models=[found]))
    expected = "chat.1: low-memory on trial, 2.5 % of new conversations (corral trial)"
    assert expected in text.splitlines()


def test_the_reason_why_conversations_are_not_saved_is_shown() -> None:
    text = render(replace(STATUS, models=[model(not_persisted_reason="its window slides")]))
    assert "chat saves no conversations across restarts: its window slides" in text.splitlines()
    assert "over restarts" not in shown()


def test_without_nodes_there_is_no_table_of_nodes() -> None:
    assert "NODE" not in render(STATUS)


def test_nodes_are_shown_with_their_models_and_problems() -> None:
    text = render(
        replace(STATUS, nodes=[node("gpu", None, "chat", "tiny"), node("nas", "is away")])
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["gpu", "up", "1/4", "http://gpu:8080", "chat,", "tiny"] in lines
    assert ["nas", "down", "0/0", "http://nas:8080", "-"] in lines
    assert "nas: is away" in text


def weight(instance: str, value: float, reason: str) -> WeightStatus:
    return WeightStatus(instance=instance, model="chat", weight=value, reason=reason)


def test_weights_are_shown_with_their_reasons_where_they_are_not_all_equal() -> None:
    equal = [weight("chat.0", 1.0, "equal"), weight("chat.1", 1.0, "equal")]
    assert "WEIGHT" not in render(replace(STATUS, weights=equal))
    text = render(replace(STATUS, weights=[*equal, weight("nas/chat", 0.25, "set")]))
    lines = [line.split() for line in text.splitlines()]
    assert ["chat.1", "1.00", "equal"] in lines
    assert ["nas/chat", "0.25", "set"] in lines


def test_batches_are_shown_once_requests_have_gathered() -> None:
    """seed 003: BatchQueueStats in the status."""
    assert "BATCHES" not in render(STATUS)
    chat = BatchQueueStatus(
        model="chat",
        total_queued=12,
        total_batches=2,
        total_single=1,
        avg_batch_size=5.5,
        avg_wait_ms=31.4,
    )
    lines = [line.split() for line in render(replace(STATUS, batches=[chat])).splitlines()]
    assert ["chat", "12", "2", "1", "5.5", "31", "ms"] in lines
    singles = replace(chat, total_batches=0, avg_batch_size=0.0)
    lines = [line.split() for line in render(replace(STATUS, batches=[singles])).splitlines()]
    assert ["chat", "12", "0", "1", "-", "31", "ms"] in lines


def test_tools_of_engines_are_named_and_louder_where_other_machines_reach_them() -> None:
    def lines(engine_tools: Literal["off", "local", "network"]) -> list[str]:
        text = render(replace(STATUS, models=[model(engine_tools=engine_tools)]))
        return [line for line in text.splitlines() if "engine_tools" in line]

    assert lines("off") == []
    (local,), (network,) = lines("local"), lines("network")
    assert local.startswith("chat: engine_tools is on: ")
    assert network.startswith("DANGER: chat: ")
    assert "other machines" in network


def test_devices_have_their_known_figures() -> None:
    text = render(replace(STATUS, devices=top_samples.DEVICES)).splitlines()[-3:]
    assert [" ".join(line.split()) for line in text] == [
        "DEVICE LOAD DEVICE MEMORY TEMPERATURE POWER THROTTLED BY",
        "NVIDIA H100 43% 20.0 GiB of 80.0 GiB 61 °C 312 of 700 W power",
        "AMD 73FF - - - - it is suspended",
    ]
    assert "DEVICE" not in render(STATUS)
