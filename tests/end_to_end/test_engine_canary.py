"""A canary on the real engine: its end, its remains, and refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.corral_cli import CorralCli, begin_stream, until

SETTINGS = '# mine\n[models.tiny]\npath = "{model}"  # small\n'


@pytest.fixture
def build(corral: CorralCli, engine_path: Path) -> Path:
    """Return the directory of another build: the same one, at another path."""
    directory = corral.root / "new"
    directory.mkdir()
    (directory / "llama-server").symlink_to(engine_path)
    return directory


@pytest.fixture
def running(corral: CorralCli, tiny_model: Path) -> CorralCli:
    corral.configure(SETTINGS.format(model=tiny_model))
    corral.ok("start")
    return corral


def settings(corral: CorralCli) -> str:
    return (corral.root / "config" / "corral.toml").read_text("utf-8")


def last(corral: CorralCli) -> dict[str, Any]:
    """Return the canary that ended last, once one has ended and none runs."""
    until(lambda: (found := corral.client.canaries()).ended and not found.running)
    return corral.client.canaries().ended[-1]


def test_a_promoted_build_becomes_the_models_own_and_cuts_no_answer(
    running: CorralCli, build: Path
) -> None:
    started = running.ok("engine", "canary", str(build), "--share", "50%")
    assert f"tiny.1 serves 50 % of new conversations on {build}/llama-server" in started
    assert "--promote or --withdraw ends it" in started
    assert "(corral engine canary)" in running.ok("status")
    assert running.data("trial") == []
    (found,) = running.data("engine", "canary")["running"]
    assert found["trial"]["differences"] == []
    with httpx.Client(timeout=60) as client:
        for number in range(12):
            messages = [{"role": "user", "content": f"question {number}"}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 6}
            answer = client.post(f"{running.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
    (found,) = running.data("engine", "canary")["running"]
    assert all(found["trial"][side]["requests"] for side in ("base", "trial"))

    stream = begin_stream(running, 200)
    shown = running.ok("engine", "canary", "--promote")
    assert f"tiny: {build}/llama-server was promoted: by command" in shown
    assert stream.read().strip().endswith(b"data: [DONE]")
    until(lambda: set(running.instances()) == {"tiny.0~2"})
    assert f'# small\nengine = "{build}/llama-server"' in settings(running)
    assert settings(running).startswith("# mine\n")
    assert running.data("reload", "--dry-run")["changed"] == []
    again = running("engine", "canary", str(build))
    assert (again.returncode, "runs" in again.stderr) == (78, True)


def test_a_crash_withdraws_it_at_once_and_so_does_a_restart_of_the_daemon(
    running: CorralCli, build: Path
) -> None:
    running.ok("engine", "canary", str(build))
    pid = running.instances()["tiny.1"].pid
    assert pid
    os.kill(pid, signal.SIGABRT)
    ended = last(running)
    assert ended["outcome"] == "withdrawn"
    assert ended["reason"].startswith("its engine crashed")
    until(lambda: set(running.instances()) == {"tiny.0"})

    running.ok("engine", "canary", str(build))
    before = settings(running)
    running.ok("stop")
    running.ok("start")
    assert set(running.instances()) == {"tiny.0"}
    assert last(running)["reason"] == "the daemon was restarted"
    assert running.events("canary.withdrawn")[-1]["reason"] == "the daemon was restarted"
    assert f"{build}/llama-server was withdrawn: the daemon" in running.ok("engine", "canary")
    assert settings(running) == before


def test_one_of_which_nothing_is_known_is_withdrawn_at_its_deadline(
    running: CorralCli, build: Path
) -> None:
    shown = running.ok("engine", "canary", str(build), "--model", "tiny", "--for", "0.1s")
    assert "tiny.1 serves 10 % of new conversations" in shown
    assert "too few requests" in last(running)["reason"]
    until(lambda: set(running.instances()) == {"tiny.0"})
    assert running("engine", "canary", "--withdraw").returncode == 1


def test_what_cannot_be_a_canary_changes_nothing(
    running: CorralCli, build: Path, engine_path: Path
) -> None:
    broken = build.with_name("broken-llama-server")
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *--model*) exit 1;; esac\nexec "{engine_path}" "$@"\n'
    )
    broken.chmod(0o700)
    failed = running("engine", "canary", str(broken))
    assert failed.returncode == 1
    assert "tiny.1 did not start" in failed.stderr
    until(lambda: set(running.instances()) == {"tiny.0"})
    for words, code in (
        ([str(build / "nothing")], 78),
        (["b99999"], 78),
        ([str(build), "--model", "other"], 4),
        ([str(build), "--share", "100%"], 2),
        ([str(build), "--promote"], 2),
    ):
        assert running("engine", "canary", *words).returncode == code
    assert running.data("engine", "canary") == {"running": [], "ended": []}
