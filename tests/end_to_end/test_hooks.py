"""Commands run when something happens to a model of the real engine."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
from support.corral_cli import CorralCli, until

SETTINGS = """
[models.m]
path = "{model}"
flags = {{ parallel = 1, threads = 1 }}

[hooks]
model_idle_s = 1
model_loaded = ["./missing"]
{hooks}
"""
NAMES = ("model_failed", "model_idle", "model_unloaded")


def told(corral: CorralCli) -> list[dict[str, Any]]:
    path = corral.root / "config" / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_commands_run_on_load_failure_and_stop(corral: CorralCli, tiny_model: Path) -> None:
    hooks = "\n".join(f'{name} = ["sh", "-c", "cat >> told"]' for name in NAMES)
    corral.configure(SETTINGS.format(model=tiny_model, hooks=hooks))
    assert "no program" in corral("doctor").stdout
    assert "exited with code 0" in corral.ok("hooks", "test", "model_idle")
    assert [event["event"] for event in told(corral)] == ["model_idle"]
    corral.ok("start")
    until(lambda: [event["event"] for event in told(corral)][1:] == ["model_idle"])
    (warning,) = corral.events("hook.failed")
    assert "there is no program" in warning["reason"]

    loaded = ["sh", "-c", "cat >> told"]
    text = SETTINGS.format(model=tiny_model, hooks=hooks)
    corral.configure(text.replace('["./missing"]', json.dumps(loaded)))
    corral.ok("reload")
    psutil.Process(corral.instances()["m.0"].pid or 0).send_signal(signal.SIGSEGV)
    until(lambda: len(told(corral)) >= 4)
    failed, again = told(corral)[2:4]
    assert (failed["event"], failed["instance"]) == ("model_failed", "m.0")
    assert failed["restarts"] is True
    assert failed["cause"]["message"]
    assert (again["event"], again["model"]) == ("model_loaded", "m")
    corral.ok("stop")
    assert told(corral)[-1]["event"] == "model_unloaded"
    assert told(corral)[-1]["cause"]["code"] == "daemon_stops"
