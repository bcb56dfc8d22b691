"""The whole state, and the bounds of the events that wait for a listener."""

from __future__ import annotations

from dataclasses import replace

import orjson

from proxy.dashboard.host import HostInstance, HostModel
from proxy.dashboard.live import LINES_MAX, LogLines
from proxy.dashboard.state import Observed, caches_of, state_of
from proxy.nodes.nodes import NodeStats
from proxy.request.models import ModelInfo
from proxy.router.lease import InstanceStats
from proxy.router.queue import QueueStats
from proxy.upstream.upstream import Node, Upstream

CHAT = ModelInfo("chat", ("gpt",), "loaded", 1, 4096, 3)
OWN = HostInstance("chat.0", "chat", "ready", 12.0, pid=7, rss_bytes=100, restarts=2)
UPSTREAM = Upstream("chat.0", "chat", 2, None, "127.0.0.1", 1, "")
SERVED = InstanceStats(
    UPSTREAM, in_service=True, conversations=1, prefill_tps=10, decode_tps=20, leases=()
)
REMOTE = replace(UPSTREAM, name="gpu/chat", slots=1, node=Node("gpu", "chat"))


def test_a_state_has_the_known_facts() -> None:
    observed = Observed(
        now_s=110.0,
        started_at_s=10.0,
        server={"version": "1"},
        model_infos=[
            CHAT,
            replace(CHAT, id="far", is_local=False, input_modalities=("image",)),
        ],
        models={"chat": HostModel("base", unload_in_s=60.0)},
        instances=[OWN, replace(OWN, name="chat.1", state="stopped", pid=None, rss_bytes=None)],
        served=[SERVED, replace(SERVED, upstream=REMOTE)],
        queues={"chat": QueueStats(2, 1, 5.0, 7.0)},
        nodes=[NodeStats("gpu", "http://192.0.2.1:8080", "up", None, ("chat",), 1)],
    )
    state = state_of(observed)
    assert b"null" not in orjson.dumps(state)
    chat = state["models"]["chat"]
    assert (chat["memory_bytes"], chat["restarts"], chat["unload_at_s"]) == (100, 4, 160.0)
    assert chat["queue"] == {
        "length": 3,
        "interactive": 2,
        "batch": 1,
        "oldest_at_s": 95.0,
        "expected_wait_s": 7.0,
    }
    assert state["models"]["far"]["actions"] == []
    assert state["models"]["far"]["sees_images"]
    assert "sees_images" not in chat
    instances = state["instances"]
    assert (instances["chat.0"]["since_at_s"], len(instances["chat.0"]["slots"])) == (2.0, 2)
    assert instances["chat.1"]["slots"] == {}
    assert (instances["gpu/chat"]["node"], len(instances["gpu/chat"]["slots"])) == ("gpu", 1)
    assert "reason" not in state["nodes"]["gpu"]


def test_counts_are_summed_by_model() -> None:
    assert caches_of({"found": [("a", 3), ("a", 4)], "expected": [("b", 1)]}) == {
        "a": {"found": 7, "expected": 0},
        "b": {"found": 0, "expected": 1},
    }


def test_lines_that_wait_are_bounded() -> None:
    log = LogLines("chat.0")
    for number in range(LINES_MAX + 2):
        log.add(str(number))
    found = log.take()
    assert found
    assert (found["lines"][0], found["dropped"]) == ("2", 2)
    for _ in range(1000):
        log.add("x" * 4096)
    found = log.take()
    assert found
    assert (len(found["lines"]), found["dropped"]) == (256, 744)
    assert log.take() is None
