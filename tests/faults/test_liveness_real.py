"""Liveness on the real engine, through the real daemon: which instances are withdrawn.

The interval is 1 s here, the shortest there is.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from faults.daemon_under_test import DaemonUnderTest, Models
from support import tiny_gguf
from support.corral_cli import PATIENCE_S, CorralCli, until

from supervisor.builds.discover import Engine
from supervisor.engine.launch import PROCESS_TAG_ENV, process_tag

INTERVAL_S = 1.0
CLOSELY = "[supervisor]\nliveness_interval_s = 1\nstop_timeout_s = 1\n"


@pytest.fixture
def target(
    corral: CorralCli, tiny_model: Path, slow_model: Path, engine: Engine
) -> DaemonUnderTest:
    return DaemonUnderTest(corral, Models(tiny_model, slow_model, engine))


@dataclass(frozen=True)
class Outcome:
    """How one request went: when it began, and `whole`, `error event`, or the fault."""

    began_at_s: float
    how: str


def ask(url: str, **members: object) -> Outcome:
    """Request a stream and read it to its end."""
    began_at_s = time.monotonic()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=PATIENCE_S
    )
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, **members}))
        response = connection.getresponse()
        if response.status != 200:
            return Outcome(began_at_s, f"status {response.status}")
        return Outcome(began_at_s, _how(response.read()))
    except http.client.IncompleteRead as broken:
        return Outcome(began_at_s, _how(broken.partial))
    except OSError as error:
        return Outcome(began_at_s, repr(error))
    finally:
        connection.close()


def _how(text: bytes) -> str:
    last = text.strip().rpartition(b"\n")[2]
    if last == b"data: [DONE]":
        return "whole"
    return "error event" if last.startswith(b'data: {"error"') else f"broken: {last[-80:]!r}"


def unhealthy(target: DaemonUnderTest) -> list[object]:
    """The instances that became unhealthy, in order."""
    changes = target.events("instance.state_changed")
    return [change["instance"] for change in changes if change["after"] == "unhealthy"]


def test_a_stopped_replica_is_replaced_under_load(target: DaemonUnderTest) -> None:
    target.serve({"m": target.models.slow}, CLOSELY, "replicas = 2")
    url, pid = target.corral.url, target.pid("m.0")
    enough = threading.Event()

    def keep_asking() -> list[Outcome]:
        outcomes = []
        while not enough.is_set():
            outcomes.append(ask(url, max_tokens=24))
        return outcomes

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(keep_asking) for _ in range(4)]
        try:
            until(lambda: target.instance("m.0").slots_busy)
            psutil.Process(pid).suspend()
            until(lambda: unhealthy(target))
            withdrawn_at_s = time.monotonic()
            assert target.ready_again("m.0", pid) == "ready again"
        finally:
            enough.set()
        outcomes = [outcome for request in asking for outcome in request.result()]
    assert {outcome.how for outcome in outcomes} <= {"whole", "error event"}
    late = [outcome for outcome in outcomes if outcome.began_at_s > withdrawn_at_s]
    assert late
    assert {entry.how for entry in late} == {"whole"}
    assert unhealthy(target) == ["m.0"]
    assert not psutil.pid_exists(pid)


def test_a_request_without_a_response_is_moved_to_another_instance(
    target: DaemonUnderTest,
) -> None:
    target.serve({"m": target.models.tiny}, CLOSELY, "replicas = 2")
    pids = {name: target.pid(name) for name in ("m.0", "m.1")}
    stopped = psutil.Process(pids["m.0"])
    stopped.suspend()
    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(ask, target.corral.url, max_tokens=4) for _ in range(2)]
        assert [request.result().how for request in asking] == ["whole", "whole"]
    assert target.ready_again("m.0", pids["m.0"]) == "ready again"
    assert target.pid("m.1") == pids["m.1"]


def test_a_long_prefill_is_not_unhealthy(target: DaemonUnderTest, tmp_path: Path) -> None:
    """One batch of 2048 tokens lasts for several intervals, and no counter moves within it."""
    model = tiny_gguf.make(
        tmp_path / "large.gguf", embd=512, heads=8, kv_heads=2, layers=12, ff=2048, ctx=8192
    )
    flags = "[models.m.flags]\nbatch-size = 2048\nthreads = 1\nthreads-batch = 1\nparallel = 1\n"
    target.serve({"m": model}, CLOSELY, f"{flags}ctx-size = 8192\n")
    pid = target.pid("m.0")
    words = [{"role": "user", "content": "abcdefgh " * 220}]
    outcome = ask(target.corral.url, messages=words, max_tokens=2)
    assert outcome.how == "whole"
    assert unhealthy(target) == []
    assert target.pid("m.0") == pid


def test_a_suspended_daemon_withdraws_no_instance(target: DaemonUnderTest) -> None:
    tiny = target.models.tiny
    target.serve({"m": target.models.slow, "idle": tiny, "stopped": tiny}, CLOSELY)
    pids = {name: target.pid(name) for name in ("m.0", "idle.0")}
    stopped = target.pid("stopped.0")
    stream = target.stream("m")
    daemon = psutil.Process(target.corral.daemon_pid)
    daemon.suspend()
    time.sleep(4 * INTERVAL_S)  # the test is about the time that passes
    psutil.Process(stopped).suspend()
    daemon.resume()
    while not unhealthy(target):  # two more looks have passed once the stopped one is withdrawn
        assert stream.readline()
    stream.close()
    assert unhealthy(target) == ["stopped.0"]
    assert {name: target.pid(name) for name in pids} == pids


def test_a_probe_finds_a_stopped_idle_engine(target: DaemonUnderTest) -> None:
    limits = f"{CLOSELY}idle_probe_s = 1\nunhealthy_timeout_s = 1\n"
    target.serve({"m": target.models.tiny}, limits)
    pid = target.pid("m.0")
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    assert target.ready_again("m.0", pid) == "ready again"


def test_a_stopped_idle_replica_is_replaced_without_a_probe_and_harms_no_request(
    target: DaemonUnderTest,
) -> None:
    limits = "[supervisor]\nidle_probe_s = 0\nunhealthy_timeout_s = 3600\n"
    target.serve({"m": target.models.tiny}, limits, "replicas = 2")
    pid = target.pid("m.0")
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    assert target.ready_again("m.0", pid) == "ready again"
    assert [ask(target.corral.url, max_tokens=4).how for _ in range(4)] == ["whole"] * 4
    assert unhealthy(target) == ["m.0"]


def test_a_starting_daemon_kills_orphaned_engines(
    target: DaemonUnderTest,
) -> None:
    marker = process_tag(target.root / "run", "m.0", "/bin/sleep")
    with subprocess.Popen(
        ["/bin/sleep", "600"], env={PROCESS_TAG_ENV: marker}, start_new_session=True
    ) as stray:
        target.serve({"m": target.models.tiny})
        assert stray.wait(PATIENCE_S) == -signal.SIGKILL
    assert [event["pid"] for event in target.events("engine.orphan_killed")] == [stray.pid]
