"""`corral start` and `load`: further models, broken ones among them, and Ctrl-C."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from support import tiny_bert, tiny_gguf
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.stores_layout import Ollama


@pytest.fixture
def models(corral: CorralCli) -> Path:
    """Return a directory with `a.gguf`, `b.gguf`, `c.gguf`, and `broken.gguf`, which is damaged."""
    directory = corral.root / "models"
    directory.mkdir()
    for name in "abc":
        tiny_gguf.make(directory / f"{name}.gguf")
    (directory / "broken.gguf").write_bytes(b"GGUF")
    corral.env["CORRAL_PROXY__LISTEN"] = "127.0.0.1:0"
    return directory


def ask(corral: CorralCli, model: str) -> str:
    client = OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    return answer.choices[0].message.content or ""


def test_a_running_daemon_gets_further_models(corral: CorralCli, models: Path) -> None:
    corral.ok("start", str(models / "a.gguf"))
    pid = corral.instances()["a.0"].pid
    again = corral.ok("start", "a").splitlines()
    assert again == [
        "ready: a.0",
        f"{corral.url}/v1",
        "  corral ui     opens the dashboard",
        "  corral run a  chats with it here",
    ]
    started = corral("start", "b.gguf", directory=models)
    assert "ready: b.0" in started.stdout
    assert f"corral config set models.b.path {models / 'b.gguf'}" in started.stderr
    assert "ready: c.0" in corral("load", "c.gguf", directory=models).stdout
    assert all(ask(corral, name) for name in "abc")
    repeated = corral("start", "b.gguf", directory=models)
    assert (repeated.returncode, repeated.stderr) == (0, "")
    assert corral.data("reload")["kept"] == ["a.0", "b.0", "c.0"]
    assert corral.instances()["a.0"].pid == pid


def test_a_running_daemon_with_other_settings_is_told_of(corral: CorralCli, models: Path) -> None:
    corral.configure(f'[models.a]\npath = "{models / "a.gguf"}"')
    own, other = corral.root / "config" / "corral.toml", corral.root / "other.toml"
    other.write_text(own.read_text("utf-8"), "utf-8")
    corral.ok("start", "--config", str(own))
    assert corral("start", "--config", "config/corral.toml").returncode == 0
    assert corral("start", "--listen", "127.0.0.1:0").returncode == 0
    assert corral("start", "--listen", corral.url.partition("//")[2]).returncode == 0
    refused = corral("start", "--config", str(other), "--listen", "127.0.0.1:1")
    assert refused.returncode == 69
    assert f"has the settings of {own}, not of {other}" in refused.stderr
    assert "listens on 127.0.0.1:0, not on 127.0.0.1:1" in refused.stderr
    assert "corral stop" in refused.stderr


def test_an_added_model_stays_after_a_reload_of_the_settings_file(
    corral: CorralCli, models: Path
) -> None:
    del corral.env["CORRAL_PROXY__LISTEN"]
    settings = f"[models.a]\npath = '{models}/a.gguf'\n"
    corral.configure(settings)
    corral.ok("start")
    corral.ok("start", str(models / "b.gguf"))
    corral.configure(f"{settings}[models.c]\npath = '{models}/c.gguf'\n")
    report = corral.data("reload")
    assert (report["added"], report["kept"]) == (["c.0"], ["a.0", "b.0"])
    corral.configure(f"{settings}[models.b]\npath = '{models}/c.gguf'\n")
    report = corral.data("reload")
    assert (report["changed"], report["removed"]) == (["b.0"], ["c.0"])


def test_two_files_of_one_name_are_two_models(corral: CorralCli, models: Path) -> None:
    (models / "other").mkdir()
    tiny_gguf.make(models / "other" / "a.gguf")
    corral.ok("start", str(models / "a.gguf"))
    assert "ready: other-a.0" in corral("start", "other/a.gguf", directory=models).stdout
    corral.ok("stop")
    corral.ok("start", str(models / "a.gguf"), str(models / "other" / "a.gguf"))
    assert corral.model_states() == {"a": "loaded", "other-a": "loaded"}


def test_a_name_without_a_tag_is_the_latest(corral: CorralCli, models: Path) -> None:
    corral.env["OLLAMA_MODELS"] = str(models / "ollama")
    store = Ollama(models / "ollama")
    store.model("registry.ollama.ai/library/tiny/latest", model=models / "a.gguf")
    assert "ready: tiny:latest.0" in corral.ok("start", "tiny")
    assert corral.ok("unload", "tiny") == "unloaded: tiny:latest\n"


@pytest.mark.parametrize("running", [True, False], ids=["running", "not running"])
@pytest.mark.parametrize(
    ("word", "said", "hint"),
    [
        ("a.guf", "did you mean a.gguf?", "available: "),
        ("below", "below is a directory, not a GGUF file", "corral start below/in.gguf serves"),
        ("./below", "below is a directory, not a GGUF file", "corral start below/in.gguf serves"),
        ("cc.gguf", "cc.gguf not found", ""),
    ],
)
def test_a_wrong_word_is_explained(
    corral: CorralCli, models: Path, word: str, said: str, hint: str, *, running: bool
) -> None:
    (models / "below").mkdir()
    tiny_gguf.make(models / "below" / "in.gguf")
    if running:
        corral.ok("start", str(models / "c.gguf"))
    failed = corral("start", word, directory=models)
    assert failed.returncode in {4, 78}
    assert said in failed.stderr
    assert hint in failed.stderr
    if running:
        assert list(corral.model_states()) == ["c"]


def test_a_misspelt_name_gets_the_nearest(corral: CorralCli, models: Path) -> None:
    corral.configure(f"[models.chat]\npath = '{models}/a.gguf'\n")
    assert "did you mean chat?" in corral("start", "caht").stderr
    corral.ok("start")
    for command in ("start", "load", "stop", "unload", "restart"):
        assert "did you mean chat?" in corral(command, "caht").stderr


def test_a_broken_model_is_reported_with_the_models_that_serve(
    corral: CorralCli, models: Path
) -> None:
    words = [str(models / f"{name}.gguf") for name in ("a", "broken", "c")]
    started = corral("start", *words)
    assert started.returncode == 1
    assert "ready: a.0\nready: c.0\nfailed: broken.0 did not start: " in started.stdout
    assert ask(corral, "c")


def test_a_start_of_all_models_leaves_one_stopped_that_loads_on_request(
    corral: CorralCli, models: Path
) -> None:
    on_request = f"[models.b]\npath = '{models}/b.gguf'\npreload = false\n"
    corral.configure(f"[models.a]\npath = '{models}/a.gguf'\n{on_request}")
    corral.ok("start", "a", "b")
    corral.ok("stop", "b")
    said = corral.ok("start")
    assert "ready: a.0" in said
    assert "failed" not in said


def test_a_start_of_broken_models_names_them_all(corral: CorralCli, models: Path) -> None:
    failed = corral("start", str(models / "broken.gguf"), str(models / "gone.gguf"))
    assert failed.returncode == 78
    assert "broken.0 did not start" in failed.stderr
    assert "gone.0 did not start" in failed.stderr
    assert not corral.is_running()


def test_a_model_whose_draft_is_missing_starts_with_a_warning(
    corral: CorralCli, models: Path
) -> None:
    corral.configure(f"[models.a]\npath = '{models}/a.gguf'\ndraft = 'gone.gguf'\n")
    missing = "the model runs without its draft model: "
    assert missing in corral("config", "check").stderr + corral("plan", "a").stderr
    started = corral("start")
    assert (started.returncode, "ready: a.0" in started.stdout) == (0, True)
    assert f"a.0: {missing}" in started.stderr
    assert missing in corral.ok("status")


def test_ctrl_c_before_the_daemon_answers_ends_it(corral: CorralCli) -> None:
    daemon, begun = corral.root / "daemon", corral.root / "begun"
    daemon.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep 60\n", "utf-8")
    daemon.chmod(0o700)
    code = f"import sys; sys.executable = {str(daemon)!r}; import supervisor.cli as c; c.main()"
    start = subprocess.Popen(
        [sys.executable, "-c", code, "start"],
        env=corral.env,
        cwd=corral.root,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: begun.exists() and begun.read_text())
    start.send_signal(signal.SIGINT)
    _, said = start.communicate(timeout=PATIENCE_S)
    assert start.returncode == 130
    assert "stopped before the daemon answered; it ends" in said
    until(lambda: not psutil.pid_exists(int(begun.read_text())))


def test_options_of_a_start_hold_until_the_daemon_ends(corral: CorralCli, models: Path) -> None:
    corral.configure(f"[models.a]\npath = '{models}/a.gguf'\nflags = {{ threads = 1 }}\n")

    def sizes(name: str) -> tuple[int | None, int]:
        model = next(model for model in corral.status().models if model.name == name)
        return model.ctx_size, model.slots

    corral.ok("start", "a", "--ctx-size", "512", "--slots", "2", "--flag", "batch-size=64")
    assert sizes("a") == (512, 2)
    (argv,) = corral.engine_argvs()
    assert argv[argv.index("--threads") + 1] == "1"
    assert argv[argv.index("--batch-size") + 1] == "64"
    pid = corral.daemon_pid
    planned = corral("plan", "a")
    assert planned.stdout.startswith("a: 2 slots, 512 tokens of context in all")
    changes = "ctx-size = 512, parallel = 2, batch-size = 64 until it ends"
    assert f"the running daemon has {changes}" in planned.stderr
    corral.ok("start", "a", "--parallel", "1", "--profile", "low-latency")
    assert (sizes("a"), corral.status().models[0].profile) == ((512, 1), "low-latency")
    assert corral.data("reload")["kept"] == ["a.0"]
    corral.ok("start", str(models / "b.gguf"), "--ctx-size", "256", "--slots", "1")
    assert sizes("b") == (256, 1)
    assert corral.daemon_pid == pid
    corral.ok("stop")
    corral.ok("start", "a")
    assert sizes("a") != (512, 1)
    assert "name the models" in corral("start", "--slots", "2").stderr
    wrong = corral("start", "a", "--profile", "low-latncy")
    assert (wrong.returncode, "did you mean low-latency?" in wrong.stderr) == (78, True)


def test_saved_options_are_in_the_settings_file(corral: CorralCli, models: Path) -> None:
    corral.configure("# mine\n")
    file = corral.root / "config" / "corral.toml"
    words = ("--ctx-size", "512", "--slots", "2", "--profile", "low-latency", "--save")
    first = corral("start", str(models / "a.gguf"), *words)
    assert first.returncode == 0, first.stderr
    assert f"{file}: models.a.path = " in first.stderr
    second = corral("start", str(models / "b.gguf"), "--slots", "1", "--save")
    assert "to keep it" not in second.stderr
    assert set(corral.data("reload")["kept"]) == {"a.0", "b.0"}
    assert "until it ends" not in corral("plan", "b").stderr
    settings = tomllib.loads(file.read_text("utf-8"))["models"]
    flags = {"ctx-size": 512, "parallel": 2}
    assert settings["a"] == {
        "path": str(models / "a.gguf"),
        "profile": "low-latency",
        "flags": flags,
    }
    assert settings["b"] == {"path": str(models / "b.gguf"), "flags": {"parallel": 1}}
    assert file.read_text("utf-8").startswith("# mine")


def test_a_chat_is_not_suggested_with_a_model_of_embeddings(corral: CorralCli) -> None:
    rank = tiny_bert.make(corral.root / "rank.gguf", "rank")
    corral.configure(f"[models.rank]\npath = '{rank}'\n")
    lines = corral.ok("start").splitlines()
    assert lines == ["ready: rank.0", f"{corral.url}/v1", "  corral ui  opens the dashboard"]


def test_a_setting_is_printed_alone(corral: CorralCli, models: Path) -> None:
    corral.configure("[models.a]\npath = 'a.gguf'\nttl_s = 60\naliases = ['x']\n")
    assert corral.ok("config", "get", "proxy.listen") == "127.0.0.1:0\n"
    assert corral.ok("config", "get", "models.a.ttl_s") == "60.0\n"
    assert corral.ok("config", "get", "models.a.aliases") == '["x"]\n'
    assert "ttl_s = 60.0\n" in corral.ok("config", "get", "models.a")
    assert corral.data("config", "get", "models.a")["aliases"] == ["x"]
    unknown = corral("config", "get", "models.a.tl_s")
    assert (unknown.returncode, "did you mean ttl_s?" in unknown.stderr) == (78, True)
    assert (
        "no setting is named nodse; did you mean nodes?" in corral("config", "get", "nodse").stderr
    )
