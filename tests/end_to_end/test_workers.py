"""Models whose layers RPC workers compute, and workers that are lost."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from support.corral_cli import CorralCli, begin_stream, rest_of, until
from support.rpc_peer import peer
from support.running_worker import running_worker

from supervisor.daemon.control_messages import WorkerStatus

LOCAL = """
[workers.a]
local = true
threads = 1
[workers.b]
local = true
threads = 1
"""
QUICK = "[supervisor.restart]\nbackoff_initial_s = 0.05\nbackoff_max_s = 0.1\n"


def model(name: str, path: Path, workers: str = "", policy: str = "wait") -> str:
    used = f'workers = [{workers}]\non_worker_loss = "{policy}"\n' if workers else ""
    flags = "{ ctx-size = 2048, parallel = 2, threads = 1 }"
    return f'[models.{name}]\npath = "{path}"\nflags = {flags}\n{used}'


def remote(address: str, name: str = "a") -> str:
    return f'[workers.{name}]\naddress = "{address}"\n'


def answer(corral: CorralCli, name: str, prompt: str = "hello") -> str:
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{corral.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def workers(corral: CorralCli) -> dict[str, WorkerStatus]:
    return {worker.name: worker for worker in corral.status().workers}


def words_of(corral: CorralCli, name: str) -> list[str]:
    pid = corral.instances()[name].pid
    assert pid
    return psutil.Process(pid).cmdline()


def measured(corral: CorralCli) -> list[str]:
    """Return the workers that have computed passes for the engine, which reaches them by relays."""
    shards = (shard for balance in corral.client.balances() for shard in balance.shards)
    return [shard.shard_name for shard in shards if shard.total_forwards]


def test_seed_000_a_model_split_over_two_workers_answers_as_one_alone(
    corral: CorralCli, tiny_model: Path
) -> None:
    split = model("split", tiny_model, '"a", "b"')
    corral.configure(LOCAL + model("plain", tiny_model) + split)
    corral.ok("start")
    assert answer(corral, "split") == answer(corral, "plain")
    until(lambda: [worker.state for worker in workers(corral).values()] == ["ready", "ready"])
    found = workers(corral)
    assert [entry.models for entry in found.values()] == [["split"], ["split"]]
    words = words_of(corral, "split.0")
    assert len(words[words.index("--rpc") + 1].split(",")) == 2
    assert measured(corral) == ["a", "b"]
    assert words[words.index("--tensor-split") + 1] == "1,1"
    plan = corral.data("plan", "split")
    assert ",".join(entry.address for entry in found.values()) in plan["argv"]
    taken = plan["memory"]["workers"]
    assert all(entry["total"] > 0 and entry["here"] for entry in taken.values())
    assert "WORKER" in corral.ok("status")
    pids = [entry.pid or 0 for entry in found.values()]
    corral.ok("stop")
    assert not any(map(psutil.pid_exists, pids))


def test_seed_000_a_worker_that_dies_is_one_clear_error_and_is_waited_for(
    corral: CorralCli, slow_model: Path
) -> None:
    corral.configure(QUICK + LOCAL + model("m", slow_model, '"a", "b"'))
    corral.ok("start")
    for _ in range(3):  # two crashes by a request would have it refused
        with begin_stream(corral, 30_000, "m") as stream:
            until(lambda: b'"content"' in stream.readline())
            os.kill(workers(corral)["a"].pid or 0, signal.SIGKILL)
            rest = rest_of(stream)
        assert "an RPC worker that computes layers of the model was lost" in rest
        until(lambda: corral.instances()["m.0"].state == "ready")
    assert workers(corral)["a"].restarts == 3
    assert answer(corral, "m")
    assert not corral.events("instance.failed")


def test_an_idle_model_is_started_again_when_its_worker_has_ended(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(QUICK + LOCAL + model("m", tiny_model, '"a"'))
    corral.ok("start")
    before = corral.instances()["m.0"].run
    os.kill(workers(corral)["a"].pid or 0, signal.SIGKILL)
    until(lambda: corral.instances()["m.0"].run > before)
    until(lambda: corral.instances()["m.0"].state == "ready")
    assert answer(corral, "m")
    assert not corral.events("upstream.failed")


def test_a_reload_moves_a_model_to_workers_and_back(corral: CorralCli, tiny_model: Path) -> None:
    plain = QUICK + model("m", tiny_model)
    corral.configure(plain)
    corral.ok("start")
    expected = answer(corral, "m")
    corral.configure(QUICK + LOCAL + model("m", tiny_model, '"a", "b"'))
    corral.ok("reload")
    assert "--rpc" in words_of(corral, "m.0")
    assert answer(corral, "m") == expected
    pids = [worker.pid or 0 for worker in workers(corral).values()]
    corral.configure(plain)
    corral.ok("reload")
    assert "--rpc" not in words_of(corral, "m.0")
    assert answer(corral, "m") == expected
    assert workers(corral) == {}
    until(lambda: not any(map(psutil.pid_exists, pids)))


def test_seed_000_a_model_runs_without_a_lost_worker_where_set(
    corral: CorralCli, slow_model: Path
) -> None:
    with running_worker(corral) as first, running_worker(corral) as second:
        split = model("m", slow_model, '"a", "b"', "without")
        corral.configure(QUICK + remote(first.address) + remote(second.address, "b") + split)
        corral.ok("start")
        expected = answer(corral, "m")
        with begin_stream(corral, 30_000, "m") as stream:
            until(lambda: b'"content"' in stream.readline())
            first.kill()
            assert "RPC worker" in rest_of(stream)
        until(lambda: corral.instances()["m.0"].state == "ready")
        assert answer(corral, "m") == expected
        words = words_of(corral, "m.0")
        assert "," not in words[words.index("--rpc") + 1]
        assert measured(corral) == ["b"]
        (warning,) = corral.instances()["m.0"].warnings
        assert warning.startswith(f"worker a at {first.address} does not answer")
        assert workers(corral)["a"].state == "lost"
        assert "m runs without it until its next start" in corral.ok("status")
        (lost,) = corral.events("worker.lost")
        assert "connection refused" in lost["reason"]


def test_seed_000_a_model_whose_worker_does_not_answer_is_not_started_here_alone(
    corral: CorralCli, tiny_model: Path
) -> None:
    with running_worker(corral) as worker:
        address = worker.address
    corral.configure(QUICK + remote(address) + model("m", tiny_model, '"a"'))
    failed = corral("start")
    assert failed.returncode == 1
    assert f"worker a at {address} does not answer: connection refused" in failed.stderr
    assert "m.0 starts when it answers" in failed.stderr
    assert corral.instances()["m.0"].error
    with running_worker(corral, address.rpartition(":")[2]):
        until(lambda: corral.instances()["m.0"].state == "ready")
        assert corral.instances()["m.0"].error is None
        corral.ok("stop")


def test_seed_000_another_version_of_the_protocol_is_refused_before_the_start(
    corral: CorralCli, tiny_model: Path
) -> None:
    with peer("other version") as port:
        corral.configure(remote(f"127.0.0.1:{port}") + model("m", tiny_model, '"a"'))

        def is_refused() -> bool:
            failed = corral("start")
            if failed.returncode != 78:  # it was not asked within the limit, on a busy machine
                assert "starts when it answers" in failed.stderr
                return False
            assert "speaks RPC protocol 9.0.0, which this engine does not" in failed.stderr
            return True

        until(is_refused)


def test_workers_are_checked_by_the_doctor(corral: CorralCli, tiny_model: Path) -> None:
    with running_worker(corral) as worker:
        gone = "[workers.gone]\naddress = '127.0.0.1:9'\n"
        corral.configure(LOCAL + remote(worker.address, "c") + gone + model("m", tiny_model, '"c"'))
        findings = json.loads(corral("doctor", "--json").stdout)["data"]["findings"]
    found = {
        finding["name"]: finding for finding in findings if finding["name"].startswith("worker ")
    }
    assert found["worker a"]["level"] == "ok"
    assert "answers" in found["worker c"]["text"]
    assert found["worker gone"]["level"] == "fail"
    assert "does not answer" in found["worker gone"]["text"]
