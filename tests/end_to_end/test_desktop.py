"""The daemon as the backend of desktop applications, whose part the test plays."""

import json
import os
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.desktop_process import DesktopProcess, Line

Start = Callable[..., DesktopProcess]


@pytest.fixture
def start(corral: CorralCli, tiny_model: Path) -> Iterator[Start]:
    corral.configure(
        f'[models.tiny]\npath = "{tiny_model}"\n[models.tiny.restart]\nmax_failures = 1\n'
    )
    started: list[DesktopProcess] = []

    def start(*words: str, stdin: int | None = None) -> DesktopProcess:
        started.append(DesktopProcess(corral, *words, stdin=stdin))
        return started[-1]

    yield start
    for process in started:
        process.end()


def status_of(ready: Line, headers: dict[str, str]) -> int:
    request = urllib.request.Request(f"{ready['url']}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            status: int = answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return status


def key_of(ready: Line) -> dict[str, str]:
    return {"Authorization": f"Bearer {Path(ready['api_key_file']).read_text('utf-8')}"}


def is_alive(corral: CorralCli, ready: Line) -> bool:
    return bool(corral.engines()) or Path(f"/proc/{ready['pid']}").exists()


def test_a_host_sees_a_model_load_and_all_end_with_its_pipe(
    corral: CorralCli, start: Start
) -> None:
    host = start("tiny")
    ready = host.line()
    assert (ready["event"], ready["schema"], ready["attached"]) == ("ready", 1, False)
    assert ready["models"] == ready["requested"] == ["tiny"]
    assert ready["pid"] == corral.daemon_pid
    assert ready["url"].startswith("http://127.0.0.1:")
    assert stat.S_IMODE(Path(ready["api_key_file"]).stat().st_mode) == 0o600
    progress = host.until(event="progress", instance="tiny.0")
    assert 0 <= progress["value"] <= 1
    host.until(event="state", instance="tiny.0", state="ready")
    host.close_stdin()
    assert host.line() == {"event": "stopping", "reason": "the last desktop host has left"}
    assert host.rest()[-1] == {"event": "stopped", "daemon_running": False}
    assert host.wait() == 0
    assert not is_alive(corral, ready)
    assert not Path(ready["api_key_file"]).exists()


def test_its_pages_need_the_key_and_an_origin_of_an_application(start: Start) -> None:
    ready = start().line()
    key = key_of(ready)
    assert status_of(ready, {}) == 401
    assert status_of(ready, key) == 200
    for origin in (
        "tauri://localhost", "http://tauri.localhost", "app://chat", "vscode-webview://1a2b"
    ):  # fmt: skip
        assert status_of(ready, {"Origin": origin}) == 401
        assert status_of(ready, {**key, "Origin": origin}) == 200
    for origin in ("null", "file://", "https://example.com"):
        assert status_of(ready, {**key, "Origin": origin}) == 403


def test_keys_of_the_settings_are_valid_too(corral: CorralCli, start: Start) -> None:
    keys = corral.root / "config" / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.me]\nkey = "corral-me-1234"\n')
    settings = corral.root / "config" / "corral.toml"
    settings.write_text(
        settings.read_text().replace("[proxy]", '[proxy]\napi_keys_file = "keys.toml"')
    )
    ready = start().line()
    assert status_of(ready, {"X-Api-Key": "corral-me-1234"}) == 200
    assert status_of(ready, key_of(ready)) == 200


def test_two_hosts_share_a_daemon_until_both_have_left(corral: CorralCli, start: Start) -> None:
    first, second = start("tiny"), start("tiny")  # at the same moment
    ready = [first.line(), second.line()]
    assert sorted(entry["attached"] for entry in ready) == [False, True]
    assert ready[0]["pid"] == ready[1]["pid"]
    first.until(state="ready")
    second.until(state="ready")
    owner, other = (second, first) if ready[0]["attached"] else (first, second)
    owner.close_stdin()
    assert owner.rest()[-1] == {"event": "stopped", "daemon_running": True}
    assert owner.wait() == 0
    assert status_of(ready[0], key_of(ready[0])) == 200
    third = start()
    assert third.line()["attached"]
    assert third.line() == {
        "event": "state", "model": "tiny", "instance": "tiny.0", "state": "ready", "reason": None
    }  # fmt: skip
    third.process.kill()
    until(lambda: len(corral.events("host.left")) == 2)
    other.close_stdin()
    assert other.rest()[-1] == {"event": "stopped", "daemon_running": False}
    assert not is_alive(corral, ready[0])


def test_the_end_of_a_watched_process_is_the_end_of_the_host(
    corral: CorralCli, start: Start
) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as application:
        null = os.open(os.devnull, os.O_RDONLY)
        host = start("--watch-pid", str(application.pid), stdin=null)
        os.close(null)
        ready = host.line()
        application.kill()
    assert host.rest()[-1] == {"event": "stopped", "daemon_running": False}
    assert not is_alive(corral, ready)


@pytest.mark.parametrize(
    ("words", "reason"),
    [([], "standard input is not a pipe"), (["--watch-pid", "4194304"], "no such process")],
)
def test_without_anything_to_watch_it_does_not_start(
    start: Start, words: list[str], reason: str
) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    host = start(*words, stdin=null)
    os.close(null)
    error = host.line()
    assert (error["event"], error["code"]) == ("error", "settings_invalid")
    assert reason in error["message"]
    assert host.wait() == 78


def test_a_model_that_does_not_load_is_an_error_with_a_code_and_a_log(
    corral: CorralCli, start: Start
) -> None:
    (corral.root / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    host = start(str(corral.root / "broken.gguf"))
    error = host.until(event="error")
    assert (error["code"], error["instance"]) == ("model_invalid", "broken.0")
    assert error["message"]
    assert error["hint"]


def test_a_host_that_dies_and_a_daemon_that_dies_leave_no_process(
    corral: CorralCli, start: Start
) -> None:
    ours, theirs = os.pipe()
    application = subprocess.Popen(["/bin/sleep", "1000"], stdout=theirs)
    os.close(theirs)
    host = start("tiny", stdin=ours)
    os.close(ours)
    ready = host.line()
    host.until(event="progress")
    application.kill()
    application.wait()
    until(lambda: not is_alive(corral, ready), within_s=60)

    host = start("tiny")
    ready = host.line()
    host.until(state="ready")
    os.kill(ready["pid"], signal.SIGKILL)
    error = host.until(event="error")
    assert (error["code"], host.wait()) == ("daemon_exited_error", 1)
    until(lambda: not is_alive(corral, ready), within_s=60)


def test_a_process_that_is_killed_before_it_joined_leaves_no_daemon(
    corral: CorralCli, start: Start
) -> None:
    start("tiny").process.kill()
    until(lambda: not corral.engines())
    host = start("tiny")
    assert host.line()["event"] == "ready"


def test_a_daemon_that_is_no_desktop_backend_is_left_alone(corral: CorralCli, start: Start) -> None:
    corral.serve()
    host = start()
    error = host.line()
    assert (error["code"], host.wait()) == ("daemon_busy", 69)
    assert "CORRAL_RUNTIME_DIR" in error["hint"]
    assert corral.is_running()


def test_a_stop_by_command_ends_the_host_in_order(corral: CorralCli, start: Start) -> None:
    host = start()
    host.line()
    assert json.loads(corral.ok("stop", "--json"))["data"] == {"running": False}
    assert host.rest()[-1] == {"event": "stopped", "daemon_running": False}
    assert host.wait() == 0
