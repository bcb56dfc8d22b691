"""The main path on the real engine: start, request, stop; and kills."""

import http.client
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from openai import OpenAI
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, until


def configured(corral: CorralCli, model: Path, *, replicas: int = 1) -> CorralCli:
    corral.configure(f'[models.tiny]\npath = "{model}"\nreplicas = {replicas}\n')
    return corral


def client(corral: CorralCli) -> OpenAI:
    return OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)


def ask(corral: CorralCli, tokens: int = 8) -> str:
    answer = client(corral).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=tokens
    )
    return answer.choices[0].message.content or ""


def test_a_model_starts_answers_and_stops(corral: CorralCli, tiny_model: Path) -> None:
    started = configured(corral, tiny_model).ok("start")
    assert "ready" in started
    assert ask(corral)
    status = corral.data("status")
    (instance,) = status["models"][0]["instances"]
    assert instance["state"] == "ready"
    assert instance["slots"] >= 1
    assert instance["memory_bytes"] > 0
    corral.ok("stop")
    assert corral.engines() == []
    assert corral("status").returncode == 3


def test_a_daemon_that_wakes_up_does_not_interrupt_an_engine(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    (engine,) = corral.engines()
    ours = os.sched_getscheduler(0)
    expected = os.SCHED_BATCH if ours == os.SCHED_OTHER else ours  # another policy is kept
    assert os.sched_getscheduler(corral.daemon_pid) == expected
    assert os.sched_getscheduler(engine.pid) != os.SCHED_BATCH


def test_a_gguf_file_is_served_without_settings(corral: CorralCli, tiny_model: Path) -> None:
    corral.ok("start", str(tiny_model), "--listen", "127.0.0.1:0")
    (model,) = corral.status().models
    assert model.path == str(tiny_model)


def test_a_runtime_directory_too_long_for_sockets_works(
    corral: CorralCli, tiny_model: Path
) -> None:
    room = 103 - len(str(corral.root)) - len("/run//control.sock")
    corral.env["CORRAL_RUNTIME_DIR"] = str(corral.root / "run" / ("x" * room))
    corral.configure(f'[models.a-model-of-a-longer-name]\npath = "{tiny_model}"\n')
    corral.ok("start")
    (model,) = corral.status().models
    assert model.instances[0].address.startswith("127.0.0.1:")


def test_starting_a_running_model_succeeds(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model).ok("start")
    pid = corral.daemon_pid
    corral.ok("start")
    assert corral.daemon_pid == pid
    assert len(corral.engines()) == 1


def test_one_model_stops_and_restarts_while_the_daemon_stays(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    (before,) = corral.engines()
    corral.ok("restart", "tiny")
    (after,) = corral.engines()
    assert after.pid != before.pid
    corral.ok("stop", "tiny")
    assert corral.engines() == []
    assert corral.instances()["tiny.0"].state == "stopped"
    corral.ok("start", "tiny")
    assert ask(corral)


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    refused = corral("serve")
    assert refused.returncode == 69
    assert f"pid {corral.daemon_pid}" in refused.stderr


def test_replicas_share_the_load(corral: CorralCli, slow_model: Path) -> None:
    configured(corral, slow_model, replicas=2).ok("start")
    streams = [begin_stream(corral, 20_000) for _ in range(2)]
    assert [instance.slots_busy for instance in corral.instances().values()] == [1, 1]
    for stream in streams:
        stream.close()
    until(lambda: corral.slots_busy() == 0, within_s=60)


def test_a_client_that_disconnects_frees_its_slot_early(
    corral: CorralCli, slow_model: Path
) -> None:
    configured(corral, slow_model).ok("start")
    stream = begin_stream(corral, 20_000)
    assert corral.slots_busy() == 1
    stream.close()
    until(lambda: corral.slots_busy() == 0, within_s=60)


@pytest.mark.parametrize("word", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_with_its_engines(
    corral: CorralCli, tiny_model: Path, word: signal.Signals
) -> None:
    daemon = configured(corral, tiny_model).serve()
    daemon.send_signal(word)
    assert daemon.wait(PATIENCE_S) == 0
    assert corral.engines() == []


def test_streams_end_complete_and_the_daemon_stops_right_after(
    corral: CorralCli, slow_model: Path
) -> None:
    daemon = configured(corral, slow_model).serve()
    streams = [begin_stream(corral, 60) for _ in range(4)]
    daemon.send_signal(signal.SIGTERM)
    endings = [stream.read().strip().rpartition(b"\n")[2] for stream in streams]
    assert endings == [b"data: [DONE]"] * 4
    assert daemon.wait(PATIENCE_S) == 0


def test_a_second_signal_shortens_the_wait_and_a_third_ends_it(
    corral: CorralCli, slow_model: Path
) -> None:
    daemon = configured(corral, slow_model).serve()
    stream = begin_stream(corral, 30_000)
    daemon.send_signal(signal.SIGTERM)
    until(lambda: corral.status().stopping)
    daemon.send_signal(signal.SIGTERM)
    daemon.send_signal(signal.SIGINT)  # a different signal: a pending one does not count twice
    daemon.wait(PATIENCE_S)
    with pytest.raises(http.client.IncompleteRead) as broken:
        stream.read()
    assert broken.value.partial.strip().rpartition(b"\n")[2].startswith(b'data: {"error"')


@pytest.mark.parametrize("moment", ["loading", "idle", "streaming"])
def test_no_engine_survives_a_killed_daemon(
    corral: CorralCli, slow_model: Path, moment: str
) -> None:
    """Seed 002: no engine is left: Drop."""
    configured(corral, slow_model)
    daemon = corral.serve(until_ready=moment != "loading")
    until(corral.engines)
    stream = begin_stream(corral, 20_000) if moment == "streaming" else None
    daemon.kill()
    until(lambda: not corral.engines())
    daemon.wait()
    if stream:
        stream.close()
    corral.ok("start")
    assert ask(corral)


def test_the_daemon_continues_after_ctrl_c_of_a_start(corral: CorralCli, tiny_model: Path) -> None:
    engine = corral.root / "llama-server"
    path = corral.ok("engine", "path").strip()
    engine.write_text(f'#!/bin/sh\n[ $# -eq 1 ] && exec {path} "$@"\nexec sleep 600\n', "utf-8")
    engine.chmod(0o700)
    corral.configure(f'engine = "{engine}"\n[models.tiny]\npath = "{tiny_model}"\n')
    waiting = subprocess.Popen(
        corral.argv("start"), env=corral.env, cwd=corral.root, stderr=subprocess.PIPE, text=True
    )
    until((corral.root / "log" / "tiny.0.log").exists)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 130
    assert "the daemon continues" in said
    assert corral.instances()["tiny.0"].state == "starting"


def test_a_daemon_that_gets_two_signals_exits_with_0(corral: CorralCli, tiny_model: Path) -> None:
    daemon = configured(corral, tiny_model).serve()
    daemon.send_signal(signal.SIGTERM)
    while daemon.poll() is None:  # until its last moment
        daemon.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(0.02)
    assert daemon.returncode == 0


def test_stop_returns_when_the_process_has_exited(corral: CorralCli, tiny_model: Path) -> None:
    daemon = configured(corral, tiny_model).serve()
    corral.ok("stop")
    assert daemon.poll() == 0
