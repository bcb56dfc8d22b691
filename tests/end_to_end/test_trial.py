"""A live trial on the real engine: its share, its figures, and its end."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.corral_cli import CorralCli, begin_stream, until

TRIAL = '[models.tiny.trial]\nprofile = "low-memory"\nshare = 0.5  # half\n'
Configure = Callable[[str], None]


@pytest.fixture
def configure(corral: CorralCli, tiny_model: Path) -> Configure:
    """Writes settings of the model `tiny`, with its trial."""

    def write(trial: str) -> None:
        corral.configure(f'# mine\n[models.tiny]\npath = "{tiny_model}"\nreplicas = 2\n{trial}')

    return write


def converse(corral: CorralCli, text: str, turns: int = 2) -> list[str]:
    """Have a conversation; return the instances that answered its turns."""
    messages, names = [{"role": "user", "content": text}], []
    with httpx.Client(timeout=60) as client:
        for _ in range(turns):
            body = {"model": "tiny", "messages": messages, "max_tokens": 6}
            answer = client.post(f"{corral.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            names.append(answer.headers["X-Corral-Instance"])
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "so?"}]
    return names


def test_a_trial_serves_whole_conversations_survives_its_crash_and_is_applied(
    corral: CorralCli, configure: Configure
) -> None:
    configure("")
    corral.ok("start")
    pids = {name: instance.pid for name, instance in corral.instances().items()}
    assert corral.data("trial") == []

    configure(TRIAL)
    report = corral.data("reload")
    assert (report["added"], report["kept"]) == (["tiny.2"], ["tiny.0", "tiny.1"])
    served = [converse(corral, f"question {number}") for number in range(16)]
    assert all(len({name == "tiny.2" for name in names}) == 1 for names in served)
    sides = Counter(names[0] == "tiny.2" for names in served)
    assert set(sides) == {True, False}

    (found,) = corral.data("trial", "tiny")
    assert found["trial"]["conversations"] == sides[True]
    assert found["base"]["conversations"] == sides[False]
    assert found["base"]["requests"] + found["trial"]["requests"] == 32
    assert found["trial"]["tokens_per_second"] > 0
    assert "--parallel" in {difference["flag"] for difference in found["differences"]}
    shown = corral.ok("trial")
    assert "low-memory serves 50 % of new conversations; tiny.2 is ready" in shown

    pid = corral.instances()["tiny.2"].pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: corral.instances()["tiny.2"].state != "ready")
    assert all(converse(corral, f"while it is gone {number}", 1) for number in range(4))
    until(lambda: corral.instances()["tiny.2"].state == "ready")
    assert corral.data("trial", "tiny")[0]["trial"]["crashes"] == 1

    stream = begin_stream(corral, 200)
    text = corral.ok("trial", "tiny", "--apply")
    assert 'models.tiny.profile = "low-memory"' in text
    assert stream.read().strip().endswith(b"data: [DONE]")
    until(lambda: set(corral.instances()) == {"tiny.0~2", "tiny.1~2"})
    settings = (corral.root / "config" / "corral.toml").read_text()
    assert "# mine" in settings
    assert "trial" not in settings
    assert not pids.keys() & corral.instances().keys()
    assert corral.data("trial") == []
    assert corral("trial", "tiny").returncode == 1
    assert corral.data("reload", "--dry-run")["changed"] == []


def test_a_trial_that_is_ended_leaves_the_others_alone(
    corral: CorralCli, configure: Configure
) -> None:
    configure(TRIAL)
    corral.ok("start")
    before = {name: instance.pid for name, instance in corral.instances().items()}
    corral.ok("trial", "tiny", "--end")
    until(lambda: set(corral.instances()) == {"tiny.0", "tiny.1"})
    assert {
        name: instance.pid for name, instance in corral.instances().items()
    }.items() <= before.items()
    directory = corral.root / "config"
    (backup,) = directory.glob("corral.toml.*.bak")
    assert "share = 0.5  # half" in backup.read_text()


def test_a_trial_that_does_not_start_harms_nobody(corral: CorralCli, configure: Configure) -> None:
    configure("")
    corral.ok("start")
    configure(TRIAL.replace("low-memory", "nothing"))
    refused = corral("reload")
    assert refused.returncode == 78
    assert "profile 'nothing' not found" in refused.stderr
    (corral.root / "config" / "broken.jinja").write_text("{% if %}")
    configure(TRIAL + 'flags = { chat-template-file = "broken.jinja" }\n')
    assert corral("reload").returncode == 1
    assert all(converse(corral, f"question {number}", 1) for number in range(6))
    (found,) = corral.data("trial")
    assert found["error"]
    kept = (corral.root / "config" / "corral.toml").read_text()
    assert corral("trial", "tiny", "--apply").returncode == 1
    assert (corral.root / "config" / "corral.toml").read_text() == kept
    assert all(converse(corral, f"another {number}", 1) for number in range(6))
    configure(TRIAL.replace("low-memory", "nothing"))
    corral.ok("trial", "tiny", "--end")
    assert corral.data("trial") == []
