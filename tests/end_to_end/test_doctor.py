"""`corral doctor` and `corral events`, as a person types them."""

import json
import subprocess
from pathlib import Path

import pytest
from end_to_end.home import PATIENCE_S, Corral, until


def levels(corral: Corral) -> dict[str, str]:
    """Return the worst level of each thing that was looked at."""
    envelope = json.loads(corral("doctor", "--json").stdout)
    worst: dict[str, str] = {}
    for one in envelope["data"]["findings"]:
        worst[one["name"]] = max(worst.get(one["name"], ""), one["level"], key=_badness)
    assert envelope["exit_code"] == int("fail" in worst.values())
    return worst


def _badness(level: str) -> int:
    return ["", "ok", "warn", "fail"].index(level)


def configured(corral: Corral, model: Path, more: str = "") -> Corral:
    corral.configure(f'[models.tiny]\npath = "{model}"\n{more}')
    return corral


def test_a_healthy_place_has_no_failures_before_and_while_it_serves(
    corral: Corral, tiny_model: Path
) -> None:
    configured(corral, tiny_model)
    assert "fail" not in levels(corral).values()
    assert not (corral.home / "run").exists()
    corral.ok("start")
    assert "fail" not in levels(corral).values()
    assert "tiny.0 ready" in corral.ok("doctor")


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ('[models.m]\npath = "gone.gguf"\n', "model m"),
        ('[models.m]\npath = "cut.gguf"\n', "model m"),
        ('[models.m]\npath = "MODEL"\nprofile = "low-latncy"\n', "model m"),
        ('engine = "gone"\n', "engine"),
        ("[proxy]\nlsten = 1\n", "settings"),
    ],
)
def test_what_is_wrong_is_named_with_a_cure(
    corral: Corral, tiny_model: Path, settings: str, culprit: str
) -> None:
    corral.configure(settings.replace("MODEL", str(tiny_model)))
    (corral.home / "config" / "cut.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    found = levels(corral)
    assert [name for name, level in found.items() if level == "fail"] == [culprit]
    shown = corral("doctor")
    assert shown.returncode == 1
    assert "cure:" in shown.stdout
    assert f"will not work: {culprit}" in shown.stdout


def test_leftovers_of_a_killed_daemon_are_told(corral: Corral, tiny_model: Path) -> None:
    daemon = configured(corral, tiny_model).serve()
    daemon.kill()
    daemon.wait()
    until(lambda: not corral.engines())
    assert levels(corral)["leftovers"] == "warn"
    corral.ok("start")
    assert levels(corral)["leftovers"] == "ok"


def test_a_report_can_be_pasted_anywhere(corral: Corral, tiny_model: Path) -> None:
    corral.env["HOME"] = str(corral.home)
    key = 'args = ["--api-key", "hunter2"]\n'
    configured(corral, tiny_model, key)
    for words in (["doctor"], ["doctor", "--json"]):
        said = corral(*words).stdout
        assert "hunter2" not in said
        assert str(corral.home) not in said
        assert "~/" in said


def test_events_are_shown_until_the_daemon_ends(corral: Corral, tiny_model: Path) -> None:
    assert corral("events").returncode == 3
    configured(corral, tiny_model).ok("start")
    listeners = [listen(corral), listen(corral, "--json")]
    corral.ok("restart", "tiny")
    corral.ok("stop")
    text, lines = (listener.communicate(timeout=PATIENCE_S)[0] for listener in listeners)
    told = [json.loads(line) for line in lines.splitlines()]
    assert {"name", "level", "at", "fields"} == set(told[0])
    assert told[-1]["name"] == "daemon.stopped"
    assert "instance.state_changed" in text
    assert "after=ready" in text
    assert [listener.returncode for listener in listeners] == [0, 0]


def test_events_nobody_reads_on_end_in_silence(corral: Corral, tiny_model: Path) -> None:
    configured(corral, tiny_model).ok("start")
    listener = listen(corral)
    assert listener.stdout
    listener.stdout.close()
    corral.ok("restart", "tiny")
    assert listener.wait(10) == 141
    assert listener.stderr
    assert listener.stderr.read() == ""
    listener.stderr.close()


def listen(corral: Corral, *words: str) -> subprocess.Popen[str]:
    """Begin to listen to events, and return when the daemon has taken the listener in."""
    pipe = subprocess.PIPE
    argv = corral.argv("events", *words)
    before = connections(corral)
    listener = subprocess.Popen(
        argv, env=corral.env, cwd=corral.home, stdout=pipe, stderr=pipe, text=True
    )
    until(lambda: connections(corral) > before)
    return listener


def connections(corral: Corral) -> int:
    """Count the open files of the daemon, to which each listener adds one."""
    return len([*Path(f"/proc/{corral.daemon_pid}/fd").iterdir()])
