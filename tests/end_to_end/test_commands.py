"""Commands that change nothing, run as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corral_cli import CorralCli, until

from supervisor.system import machine

KEYS = {"schema", "command", "status", "exit_code", "data", "notes", "error"}


@pytest.fixture
def configured(corral: CorralCli, tiny_model: Path) -> CorralCli:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\nprofile = "low-latency"\n')
    return corral


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], "llama-corral"),
        (["engine", "list"], "package"),
        (["engine", "path"], "llama-server"),
        (["engine", "help", "ctx-size"], "--ctx-size"),
        (["engine", "help"], "--flash-attn"),
        (["model", "list"], "smollm2"),
        (["profile", "list"], "speculative"),
        (["profile", "show", "low-latency"], "flash-attn"),
        (["profile", "check"], "low-memory: fine"),
        (["config", "check"], "models: tiny"),
        (["config", "show"], "models.tiny.profile"),
        (["config", "path"], "corral.toml"),
        (["plan", "tiny"], "--ctx-size"),
    ],
    ids=" ".join,
)
def test_read_only_commands_show_something(
    configured: CorralCli, words: list[str], said: str
) -> None:
    assert said in configured.ok(*words)


def test_config_check_looks_at_the_files_of_flags(corral: CorralCli, tiny_model: Path) -> None:
    flags = "[models.tiny.flags]\nchat-template-file = 'agent.jinja'\n"
    corral.configure(f"[models.tiny]\npath = '{tiny_model}'\n{flags}")
    failed = corral("config", "check")
    missing = corral.root / "config" / "agent.jinja"
    assert failed.returncode == 78
    assert f"models.tiny.flags.chat-template-file: {missing} does not exist" in failed.stderr
    assert "the directory of the settings file" in failed.stderr
    missing.write_text("{{ messages[0].content }}")
    assert "models: tiny" in corral.ok("config", "check")
    assert str(missing) in corral.ok("plan", "tiny")


def test_config_check_names_the_model_and_the_profile_of_each_error(
    corral: CorralCli, tiny_model: Path
) -> None:
    profile = corral.root / "config" / "profiles" / "sleepy.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('description = "sleeps"\n[flags]\nsleep-idle-seconds = 60\n')
    model = f"path = '{tiny_model}'\n"
    corral.configure(
        f"[models.a]\nprofile = 'sleepy'\n{model}[models.b]\nflags.threads = 'two'\n{model}"
    )
    failed = corral("config", "check")
    assert failed.returncode == 78
    assert "a: profile sleepy: sleep-idle-seconds cannot be set: " in failed.stderr
    assert "b: threads = two is invalid (allowed: an integer)" in failed.stderr
    assert "error: profile sleepy: sleep-idle-seconds" in corral("profile", "check").stderr


@pytest.mark.parametrize("words", [("0s",), ("nan",), ("99d",), ("1h", "--end"), ("soon",)])
def test_devices_are_not_yielded_for_an_impossible_time(
    corral: CorralCli, words: tuple[str, ...]
) -> None:
    failed = corral("yield", *words)
    assert failed.returncode == 2
    assert "Invalid value" in failed.stderr


def test_the_metadata_of_a_gguf_file_is_shown(corral: CorralCli, tiny_model: Path) -> None:
    assert "llama" in corral.ok("model", "show", str(tiny_model))
    assert corral.data("model", "show", str(tiny_model))["architecture"] == "llama"


@pytest.mark.parametrize(
    "words",
    [["status"], ["plan", "tiny"], ["plan", "nothing"], ["model", "show", "gone.gguf"]],
    ids=" ".join,
)
def test_json_is_one_envelope_with_the_same_keys(configured: CorralCli, words: list[str]) -> None:
    done = configured(*words, "--json")
    envelope = json.loads(done.stdout)
    assert set(envelope) == KEYS
    assert envelope["exit_code"] == done.returncode


def test_a_plan_shows_the_origin_of_each_flag_and_the_command_that_runs(
    configured: CorralCli,
) -> None:
    plan = configured.data("plan", "tiny")
    assert all(line["origin"] for line in plan["lines"])
    configured.ok("start")
    assert configured.engine_argvs() == [plan["argv"]]


def test_a_usage_error_exits_with_2(corral: CorralCli) -> None:
    assert corral("frobnicate").returncode == 2
    assert corral("start", "--frobnicate").returncode == 2


def test_an_unknown_model_exits_with_4_and_lists_the_known(configured: CorralCli) -> None:
    failed = configured("plan", "tinny")
    assert failed.returncode == 4
    assert "tiny" in failed.stderr


def test_a_pipe_gets_no_colour(configured: CorralCli) -> None:
    configured.env.pop("NO_COLOR")
    for words in (["profile", "list"], ["plan", "tiny"], ["status"]):
        done = configured(*words)
        assert "\x1b" not in done.stdout + done.stderr


def test_status_imports_nothing_slow(configured: CorralCli) -> None:
    configured.ok("start")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "supervisor.cli", "status"],
        env=configured.env,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "supervisor.daemon.control_client" in imported
    assert not imported & {"aiohttp", "httpx", "gguf", "numpy", "psutil", "rich", "structlog"}


def test_logs_show_the_engine_and_the_daemon(configured: CorralCli) -> None:
    configured.ok("start")
    for name in ("tiny", "tiny.0"):
        assert "[llama-corral: run 1, " in configured.ok("logs", "-n", "1000", name)
    assert "daemon.started" in configured.ok("logs")
    assert len(configured.ok("logs", "-n", "2", "tiny").splitlines()) == 2
    unknown = configured("logs", "tinny")
    assert unknown.returncode == 4
    assert "tiny" in unknown.stderr


def test_logs_follow_until_they_are_interrupted(configured: CorralCli) -> None:
    configured.ok("start")
    command = configured.argv("logs", "-f", "-n", "1000")
    follower = subprocess.Popen(
        command, env=configured.env, cwd=configured.root, stdout=subprocess.PIPE, text=True
    )
    lines = follower.stdout
    assert lines
    assert "daemon.started" in lines.readline()
    until(lambda: "ready" in lines.readline())
    configured.ok("stop", "tiny")
    until(lambda: "stopped" in lines.readline())
    follower.send_signal(2)
    assert follower.wait(60) == 130
    lines.close()


def test_a_closed_pipe_is_not_a_failure(configured: CorralCli) -> None:
    command = subprocess.Popen(
        configured.argv("engine", "help"),
        env=configured.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout
    command.stdout.close()
    _, said = command.communicate()
    assert (command.returncode, said) == (141, b"")


def test_an_engine_has_the_priority_of_its_profile(configured: CorralCli) -> None:
    """Seed 002: prio 2, if this user may raise priorities.

    Source: llama.cpp, set_process_priority: `--prio 2` is a nice value of -10.
    """
    configured.ok("start")
    (engine,) = configured.engines()
    given = {line["flag"]: line["value"] for line in configured.data("plan", "tiny")["lines"]}
    assert ("--prio" in given) is machine.read().may_renice
    assert engine.nice() == (-10 if "--prio" in given else os.nice(0))
