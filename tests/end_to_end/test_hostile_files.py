"""A running daemon, and hostile files: models, settings, logs."""

import os
import shutil
import signal
from pathlib import Path

from support import hostile_gguf
from support.corral_cli import CorralCli, until


def models(**paths: Path) -> str:
    return "\n".join(f'[models.{name}]\npath = "{path}"' for name, path in paths.items())


def evil(directory: Path, name: str) -> Path:
    path = directory / f"{name.replace(' ', '-')}.gguf"
    path.write_bytes(hostile_gguf.REFUSED[name][0])
    return path


def test_an_invalid_model_file_fails_its_model_alone(
    corral: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    names = ("2^32 - 1 layers", "2^64 - 1 layers", "10^8 layers")
    wrong = {f"wrong{number}": evil(tmp_path, name) for number, name in enumerate(names)}
    os.mkfifo(tmp_path / "pipe.gguf")
    beside = Path(shutil.copy(tiny_model, tmp_path))
    text = models(tiny=tiny_model, pipe=tmp_path / "pipe.gguf", **wrong)
    corral.configure(
        f'{text}\n[models.later]\npath = "{wrong["wrong2"]}"\npreload = false\n'
        f'[models.auto]\npath = "{beside}"\ndraft = "auto"\npreload = false\nreplicas = "auto"'
    )
    corral.serve(until_ready=False)
    until((corral.root / "run" / "control.sock").exists)
    corral.ok("start", "tiny")
    corral.ok("start", "auto")
    assert corral("start", "later").returncode == 78
    until(lambda: {corral.model_states()[name] for name in ("pipe", *wrong)} == {"failed"})
    assert corral.model_states()["tiny"] == "loaded"
    for command in (
        ("model", "show", str(wrong["wrong0"])),
        ("plan", "wrong1"),
        ("config", "check"),
    ):
        done = corral(*command)
        assert done.returncode == 78
        assert "Traceback" not in done.stderr
    assert "block_count is 100000000" in corral("doctor").stdout


def test_a_reload_of_hostile_settings_is_refused(corral: CorralCli, tiny_model: Path) -> None:
    good = models(tiny=tiny_model)
    corral.configure(good)
    corral.ok("start")
    daemon = corral.daemon_pid
    settings = corral.root / "config" / "corral.toml"
    texts = (
        "a = " + "[" * 100_000,
        "a = " + "{a = " * 100_000,
        ".".join("a" * 100_000) + " = 1",
        f"{good}\nflags = {{ parallel = inf }}",
        f"{good}\nflags = {{ parallel = 0x{'f' * 5000} }}",
        "_env_prefix = 5",
    )
    for number, text in enumerate(texts):
        settings.write_text(text, "utf-8")
        done = corral("reload")
        assert (done.returncode, "Traceback" in done.stderr) == (78, False), done.stderr
        os.kill(daemon, signal.SIGHUP)
        until(lambda rejected=2 * number + 2: len(corral.events("settings.rejected")) == rejected)  # type: ignore[misc]  # a default binds the loop's number
    corral.configure(good)
    corral.ok("reload")
    assert corral.model_states()["tiny"] == "loaded"
    assert corral.daemon_pid == daemon


def test_logs_show_control_characters_escaped_unless_raw(corral: CorralCli) -> None:
    (corral.root / "log").mkdir(mode=0o700)
    log = corral.root / "log" / "daemon.log"
    log.write_bytes(b"before \x1b]0;pwned\x07\x1b[2J\x9b after \xe2\x80\xae\n")
    assert corral.ok("logs") == "before \\x1b]0;pwned\\x07\\x1b[2J\ufffd after \\u202e\n"
    assert "\x1b]0;pwned\x07" in corral.ok("logs", "--raw")
    assert "\x1b" not in corral.ok("logs", "--json")


def test_settings_in_a_world_writable_directory_are_ignored(
    corral: CorralCli, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    marker = tmp_path / "ran"
    engine = shared / "engine"
    engine.write_text(f"#!/bin/sh\ntouch {marker}\n", "utf-8")
    engine.chmod(0o755)
    (shared / "corral.toml").write_text('engine = "engine"', "utf-8")
    for words in (("doctor",), ("config", "check"), ("engine", "list"), ("config", "path")):
        done = corral(*words, directory=shared)
        assert f"{shared / 'corral.toml'} is ignored" in done.stderr
    assert not marker.exists()
