"""Reloads on the real engine: changed instances are replaced, the others keep running."""

import http.client
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from acceptance import reload_under_load
from openai import OpenAI
from support.corral_cli import CorralCli, begin_stream, until

Configure = Callable[..., None]
# For engines that tests suspend: their streams last until the end of the reload on every machine.
HARDLY_WATCHED = "[supervisor]\nliveness_interval_s = 60\n"


@pytest.fixture
def configure(corral: CorralCli, tiny_model: Path, slow_model: Path) -> Configure:
    """Writes settings of the models `tiny` and `slow`; None leaves a model out."""

    def write(tiny: str | None = "", slow: str | None = "", more: str = "") -> None:
        models = {"tiny": (tiny_model, tiny), "slow": (slow_model, slow)}
        tables = [
            f'[models.{name}]\npath = "{path}"\n{text}\n'
            for name, (path, text) in models.items()
            if text is not None
        ]
        corral.configure("\n".join([*tables, more]))

    return write


def ready_pid(corral: CorralCli, model: str) -> int:
    """The process of the one ready instance of a model."""
    (pid,) = [
        instance.pid
        for name, instance in corral.instances().items()
        if name.startswith(f"{model}.") and instance.state == "ready"
    ]
    assert pid
    return pid


def ask(corral: CorralCli, model: str) -> str:
    client = OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    return answer.choices[0].message.content or ""


def last_line(stream: http.client.HTTPResponse) -> bytes:
    return stream.read().strip().rpartition(b"\n")[2]


def test_a_changed_flag_replaces_its_model_and_an_old_stream_completes(
    corral: CorralCli, configure: Configure
) -> None:
    configure(tiny="", slow="flags = { ctx-size = 4096 }", more=HARDLY_WATCHED)
    corral.ok("start")
    tiny, slow = ready_pid(corral, "tiny"), psutil.Process(ready_pid(corral, "slow"))
    stream = begin_stream(corral, 100, model="slow")
    slow.suspend()

    configure(tiny="", slow="flags = { ctx-size = 8192 }", more=HARDLY_WATCHED)
    report = corral.data("reload")

    assert report["changed"] == ["slow.0"]
    assert report["kept"] == ["tiny.0"]
    now = corral.instances()
    assert now["tiny.0"].pid == tiny
    assert now["slow.0~2"].pid != slow.pid
    assert not now["slow.0~2"].retiring
    assert "slow.0~2" in corral.ok("start", "slow")
    assert ask(corral, "slow")
    slow.resume()
    assert last_line(stream) == b"data: [DONE]"
    until(lambda: set(corral.instances()) == {"tiny.0", "slow.0~2"})
    states = [
        (event["instance"], event["after"]) for event in corral.events("instance.state_changed")
    ]
    assert states.index(("slow.0~2", "ready")) < states.index(("slow.0", "draining"))
    assert [after for name, after in states if name == "slow.0"][-3:] == [
        *("draining", "stopping", "stopped")
    ]
    assert "slow.0~2.sock" not in corral.ok("logs", "-n", "1000", "tiny")
    for name in ("slow", "slow.0", "slow.0~2"):
        assert "slow.0~2.sock" in corral.ok("logs", "-n", "1000", name)


def test_the_second_replacement_reuses_the_first_name(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow=None)
    corral.ok("start")
    for size, name in ((1024, "tiny.0~2"), (2048, "tiny.0")):
        configure(tiny=f"flags = {{ ctx-size = {size} }}", slow=None)
        corral.ok("reload")
        until(lambda name=name: set(corral.instances()) == {name})  # type: ignore[misc]  # a default binds the loop's name
        assert ask(corral, "tiny")


def test_models_are_added_and_removed_and_a_stream_of_a_removed_one_completes(
    corral: CorralCli, configure: Configure
) -> None:
    configure(tiny=None, slow="", more=HARDLY_WATCHED)
    corral.ok("start")
    slow = psutil.Process(ready_pid(corral, "slow"))
    stream = begin_stream(corral, 100, model="slow")
    slow.suspend()

    configure(tiny="", slow=None, more=HARDLY_WATCHED)
    report = corral.data("reload")

    assert (report["added"], report["removed"]) == (["tiny.0"], ["slow.0"])
    assert ask(corral, "tiny")
    with pytest.raises(Exception, match="there is no model 'slow'"):
        ask(corral, "slow")
    slow.resume()
    changes = corral.events("instance.state_changed")
    assert "draining" in [change["after"] for change in changes if change["instance"] == "slow.0"]
    assert last_line(stream) == b"data: [DONE]"
    until(lambda: set(corral.instances()) == {"tiny.0"})
    assert len(corral.engines()) == 1


def test_a_changed_number_of_replicas_keeps_the_others_running(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow=None)
    corral.ok("start")
    first = ready_pid(corral, "tiny")
    configure(tiny="replicas = 3", slow=None)
    assert corral.data("reload")["added"] == ["tiny.1", "tiny.2"]
    assert {instance.state for instance in corral.instances().values()} == {"ready"}
    configure(tiny="replicas = 1", slow=None)
    assert corral.data("reload")["removed"] == ["tiny.1", "tiny.2"]
    until(lambda: set(corral.instances()) == {"tiny.0"})
    assert ready_pid(corral, "tiny") == first


def test_an_alias_changes_without_a_restart(corral: CorralCli, configure: Configure) -> None:
    configure(slow=None)
    corral.ok("start")
    pid = ready_pid(corral, "tiny")
    configure(tiny='aliases = ["gpt-4o"]', slow=None)
    report = corral.data("reload")
    assert report["kept"] == ["tiny.0"]
    assert report["notes"] == ["tiny: its aliases are now gpt-4o"]
    assert ask(corral, "gpt-4o")
    assert ready_pid(corral, "tiny") == pid


def test_the_default_model_changes_without_a_restart(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow="preload = false", more='[proxy]\ndefault_model = "slow"')
    corral.ok("start")
    configure('aliases = ["*"]', "preload = false", more='[proxy]\ndefault_model = "tiny"')
    notes = corral.data("reload")["notes"]
    assert notes == ["the default model is now tiny", "tiny: its aliases are now *"]
    assert ask(corral, "gpt-9")
    answer = httpx.post(f"{corral.url}/completion", json={"prompt": "a", "n_predict": 1})
    assert answer.json()["model"] == "tiny"
    infill = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}
    answer = httpx.post(f"{corral.url}/infill", json=infill)
    assert "infill is not supported" in answer.json()["error"]["message"].lower()
    assert corral.model_states() == {"tiny": "loaded", "slow": "unloaded"}


WRONG = {
    "flags = { ctx-size = 4096": "is not TOML",
    "replica = 2": "did you mean replicas?",
    "flags = { ctx-sise = 4096 }": "ctx-size",
    'flags = { mmproj = "gone.gguf" }': "gone.gguf",
    'profile = "low-latncy"': "low-latency",
}


def test_invalid_settings_change_nothing(corral: CorralCli, configure: Configure) -> None:
    configure()
    corral.ok("start")
    pids = ready_pid(corral, "tiny"), ready_pid(corral, "slow")
    for wrong, said in WRONG.items():
        configure(tiny=wrong, slow="flags = { ctx-size = 4096 }")
        refused = corral("reload")
        assert refused.returncode == 78
        assert said in refused.stderr
    assert corral("reload", "--dry-run").returncode == 78
    assert (ready_pid(corral, "tiny"), ready_pid(corral, "slow")) == pids
    assert len(corral.events("settings.rejected")) == len(WRONG)


def test_a_replacement_that_fails_leaves_the_old_instance_serving(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow=None)
    corral.ok("start")
    pid = ready_pid(corral, "tiny")
    configure(tiny='args = ["--frobnicate"]\naliases = ["new"]', slow=None)
    failed = corral("reload")
    assert failed.returncode == 1
    assert "--frobnicate" in failed.stdout
    assert "keeps its old settings" in failed.stdout
    until(lambda: set(corral.instances()) == {"tiny.0"})
    assert ready_pid(corral, "tiny") == pid
    assert ask(corral, "tiny")
    assert corral.status().models[0].aliases == []
    # The failed model still differs, so it is tried again; once corrected, it stays.
    assert corral("reload").returncode == 1
    configure(slow=None)
    assert corral.data("reload")["kept"] == ["tiny.0"]
    assert ready_pid(corral, "tiny") == pid


def test_a_failed_instance_starts_once_its_settings_are_corrected(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow='args = ["--frobnicate"]')
    assert corral("start").returncode == 1
    configure()
    assert corral.data("reload")["changed"] == ["slow.0"]
    assert ask(corral, "slow")
    assert set(corral.instances()) == {"tiny.0", "slow.0"}


def test_a_dry_run_shows_the_difference_and_changes_nothing(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow=None)
    corral.ok("start")
    before = corral.instances()["tiny.0"].pid
    configure(tiny="flags = { ctx-size = 1024 }", more='[proxy]\nlisten = "127.0.0.1:1"\n')
    done = corral("reload", "--dry-run")
    assert done.returncode == 0
    assert "would add: slow.0" in done.stdout
    assert "would replace: tiny.0" in done.stdout
    assert "proxy.listen stays 127.0.0.1:0 until the daemon is restarted" in done.stderr
    assert {name: instance.pid for name, instance in corral.instances().items()} == {
        "tiny.0": before
    }
    assert corral.events("settings.reloaded") == []


def test_a_stopped_model_stays_down_and_starts_with_the_new_settings(
    corral: CorralCli, configure: Configure
) -> None:
    configure(slow=None)
    corral.ok("start")
    corral.ok("stop", "tiny")
    configure(tiny="flags = { ctx-size = 1024 }\nreplicas = 2", slow=None)
    assert corral.data("reload")["changed"] == ["tiny.0"]
    assert corral.engines() == []
    corral.ok("start", "tiny")
    assert all("1024" in argv for argv in corral.engine_argvs())


def test_a_sighup_reloads(corral: CorralCli, configure: Configure) -> None:
    configure(slow=None)
    corral.ok("start")
    pid = ready_pid(corral, "tiny")
    configure(tiny="flags = { ctx-size = 1024 }", slow=None)
    os.kill(corral.daemon_pid, signal.SIGHUP)
    until(lambda: corral.events("settings.reloaded"))
    assert ready_pid(corral, "tiny") != pid
    configure(tiny="[", slow=None)
    os.kill(corral.daemon_pid, signal.SIGHUP)
    until(lambda: corral.events("settings.rejected"))
    assert ask(corral, "tiny")


def test_a_changed_file_is_reloaded_with_watch_settings(
    corral: CorralCli, configure: Configure
) -> None:
    watching = "[supervisor]\nwatch_settings = true\n"
    configure(slow=None)
    corral.ok("start")
    configure(slow=None, more=watching)
    corral.ok("reload")
    configure(tiny="flags = { ctx-size = 1024 }", slow=None, more=watching)
    until(lambda: len(corral.events("settings.reloaded")) == 2)
    assert corral.events("settings.reloaded")[1]["changed"] == ["tiny.0"]


def test_without_a_settings_file_all_is_kept(corral: CorralCli, tiny_model: Path) -> None:
    corral.ok("start", str(tiny_model), "--listen", "127.0.0.1:0")
    assert corral.ok("reload") == "kept: tiny.0\n"


def test_a_model_from_the_command_line_is_kept(
    corral: CorralCli, configure: Configure, tiny_model: Path, slow_model: Path
) -> None:
    configure(slow=None)
    corral.ok("start", "tiny", str(slow_model))
    pid = ready_pid(corral, "slow")
    configure(tiny=None, slow=None, more=f'[models.other]\npath = "{tiny_model}"\n')
    report = corral.data("reload")
    assert report["kept"] == ["slow.0"]
    assert (report["added"], report["removed"]) == (["other.0"], ["tiny.0"])
    assert ready_pid(corral, "slow") == pid


def test_reloads_under_load_break_no_request(corral: CorralCli) -> None:
    alphabet = reload_under_load.make_model(corral.root / "alphabet.gguf")
    findings = reload_under_load.run(corral, alphabet, clients=4, reloads=2)
    assert findings.is_fine, findings
    assert all(tally.whole > 3 for tally in findings.counts.values())


def test_a_reload_without_a_daemon_exits_with_3(corral: CorralCli) -> None:
    assert corral("reload").returncode == 3
