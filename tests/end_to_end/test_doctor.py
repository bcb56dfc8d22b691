"""`corral doctor` and `corral events`, as a person types them."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until


def levels(corral: CorralCli) -> dict[str, str]:
    """The worst level of each finding."""
    envelope = json.loads(corral("doctor", "--json").stdout)
    worst: dict[str, str] = {}
    for finding in envelope["data"]["findings"]:
        worst[finding["name"]] = max(worst.get(finding["name"], ""), finding["level"], key=_badness)
    assert envelope["exit_code"] == int("fail" in worst.values())
    return worst


def _badness(level: str) -> int:
    return ["", "ok", "warn", "fail"].index(level)


def configured(corral: CorralCli, model: Path, more: str = "") -> CorralCli:
    corral.configure(f'[models.tiny]\npath = "{model}"\n{more}')
    return corral


def test_a_healthy_installation_has_no_failures_before_and_while_it_serves(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model)
    assert "fail" not in levels(corral).values()
    assert not (corral.root / "run").exists()
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
def test_each_problem_is_named_with_a_fix(
    corral: CorralCli, tiny_model: Path, settings: str, culprit: str
) -> None:
    corral.configure(settings.replace("MODEL", str(tiny_model)))
    (corral.root / "config" / "cut.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    found = levels(corral)
    assert [name for name, level in found.items() if level == "fail"] == [culprit]
    assert ("address" in found) == (culprit != "settings")
    shown = corral("doctor")
    assert shown.returncode == 1
    assert "fix:" in shown.stdout
    assert f"will not work: {culprit}" in shown.stdout


def test_leftovers_of_a_killed_daemon_get_a_warning(corral: CorralCli, tiny_model: Path) -> None:
    daemon = configured(corral, tiny_model).serve()
    daemon.kill()
    daemon.wait()
    until(lambda: not corral.engines())
    assert levels(corral)["leftovers"] == "warn"
    corral.ok("start")
    assert levels(corral)["leftovers"] == "ok"


def test_a_report_contains_no_secret_and_no_home_directory(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.env["HOME"] = str(corral.root)
    key = 'args = ["--api-key", "hunter2"]\n'
    configured(corral, tiny_model, key)
    for words in (["doctor"], ["doctor", "--json"]):
        said = corral(*words).stdout
        assert "hunter2" not in said
        assert str(corral.root) not in said
        assert "~/" in said


def test_events_are_shown_until_the_daemon_stops(corral: CorralCli, tiny_model: Path) -> None:
    assert corral("events").returncode == 3
    configured(corral, tiny_model).ok("start")
    listeners = [
        start_events(corral, number, *words) for number, words in enumerate([(), ("--json",)])
    ]
    corral.ok("restart", "tiny")
    corral.ok("stop")
    text, lines = (listener.communicate(timeout=PATIENCE_S)[0] for listener in listeners)
    events = [json.loads(line) for line in lines.splitlines()]
    assert {"name", "level", "at", "fields"} == set(events[0])
    assert events[-1]["name"] == "daemon.stopped"
    assert "instance.state_changed" in text
    assert "after=ready" in text
    assert [listener.returncode for listener in listeners] == [0, 0]


def test_events_end_silently_when_the_reader_closes_the_pipe(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    listener = start_events(corral, 0)
    assert listener.stdout
    listener.stdout.close()
    corral.ok("restart", "tiny")
    assert listener.wait(60) == 141
    assert listener.stderr
    assert listener.stderr.read() == ""
    listener.stderr.close()


def start_events(corral: CorralCli, others: int, *words: str) -> subprocess.Popen[str]:
    """Start `corral events`; return when the daemon has accepted its connection.

    Args:
        corral: Whose daemon.
        others: How many connections the daemon has already; those of earlier commands may still
            be open for a moment.
        words: More words of the command.
    """
    pipe = subprocess.PIPE
    argv = corral.argv("events", *words)
    until(lambda: connections(corral) == others)
    listener = subprocess.Popen(
        argv, env=corral.env, cwd=corral.root, stdout=pipe, stderr=pipe, text=True
    )
    until(lambda: connections(corral) > others)
    return listener


def connections(corral: CorralCli) -> int:
    """Count the connections that the daemon has accepted on its control socket."""
    sockets = psutil.Process(corral.daemon_pid).net_connections("unix")
    control = str(corral.root / "run" / "control.sock")
    return sum(str(socket.laddr) == control for socket in sockets) - 1  # one is the listener
