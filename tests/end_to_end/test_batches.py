"""`corral batch`, and batches that outlive their daemon."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.fork_server import Fork

SETTINGS = """
[models.tiny]
path = "{path}"
[models.tiny.flags]
parallel = 4
threads = 1
"""


def write(path: Path, count: int, **members: Any) -> Path:
    """Write a file of requests, the ids r0, r1, …"""
    body = {"model": "tiny", "prompt": "the", "max_tokens": 8, **members}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = (json.dumps({"custom_id": f"r{i}", **line}) + "\n" for i in range(count))
    path.write_text("".join(lines))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def batch(corral: CorralCli) -> Any:
    """The newest batch."""
    with urllib.request.urlopen(f"{corral.url}/v1/batches", timeout=PATIENCE_S) as response:
        found = json.load(response)["data"]
    return found[0] if found else None


def test_a_file_is_computed_and_written_beside_it(
    corral: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    corral.configure(SETTINGS.format(path=tiny_model))
    path = write(tmp_path / "some.jsonl", 6)
    stopped = corral("batch", "run", str(path))
    assert (stopped.returncode, "not running" in stopped.stderr) == (3, True)
    corral.ok("start")

    done = corral("batch", "run", str(path))
    assert done.returncode == 0, done.stderr
    assert "6 of 6 lines done, 0 failed" in done.stdout
    assert ids(tmp_path / "some.output.jsonl") == [f"r{i}" for i in range(6)]
    assert not (tmp_path / "some.errors.jsonl").exists()

    again = corral("batch", "run", str(path))
    assert (again.returncode, "exists already" in again.stderr) == (1, True)
    broken = write(tmp_path / "broken.jsonl", 2, max_tokens="many")
    failed = corral("batch", "run", str(broken), "--output", str(tmp_path / "out.jsonl"))
    assert (failed.returncode, "2 failed" in failed.stdout) == (1, True)
    assert ids(tmp_path / "out.errors.jsonl") == ["r0", "r1"]

    broken.write_text('{"url": "/v1/completions"}\nno\n')
    invalid = corral("batch", "run", str(broken))
    assert (invalid.returncode, "line 2: " in invalid.stderr) == (1, True)
    assert [batch["status"] for batch in corral.data("batch", "list")] == [
        *("failed", "completed", "completed")
    ]
    (shown,) = [batch for batch in corral.data("batch", "list") if batch["status"] == "failed"]
    assert "line 1: the line has no custom_id" in corral("batch", "show", shown["id"]).stderr
    assert corral("batch", "show", "../v1/models").returncode == 1


@pytest.mark.parametrize("text", ["", "no\n", "[]\n", '{"body": {}}\n'])
def test_what_is_no_file_of_requests_is_told_with_an_example(
    corral: CorralCli, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    done = corral("batch", "run", str(path))
    assert (done.returncode, '"custom_id"' in done.stderr) == (1, True)
    assert corral("batch", "run", str(tmp_path)).returncode == 1


@contextmanager
def interrupted(corral: CorralCli, model: Path, directory: Path) -> Iterator[Fork]:
    """`corral batch run` after Ctrl-C, while it waits for the batch; it writes into `err`."""
    corral.configure(SETTINGS.format(path=model))
    corral.ok("start")
    path = write(directory / "some.jsonl", 4, max_tokens=3000)
    assert corral.fork_server
    with (directory / "err").open("wb") as err:
        command = corral.fork_server.start(
            ["batch", "run", str(path)], corral.env, directory, {2: err.fileno()}
        )
        until(lambda: (one := batch(corral)) and one["status"] == "in_progress")
        until(lambda: "batch_" in (directory / "err").read_text())
        command.send_signal(signal.SIGINT)
        yield command


def test_ctrl_c_leaves_the_batch_and_says_how_to_go_on(
    corral: CorralCli, slow_model: Path, tmp_path: Path
) -> None:
    with interrupted(corral, slow_model, tmp_path) as command:
        assert command.wait(60) == 130
    said = (tmp_path / "err").read_text()
    found = batch(corral)
    assert found["status"] == "in_progress"
    assert f"corral batch show {found['id']}" in said
    assert f"corral batch cancel {found['id']}" in said
    corral.ok("batch", "cancel", found["id"])
    until(lambda: batch(corral)["status"] == "cancelled")


def test_a_second_ctrl_c_cancels_the_batch(
    corral: CorralCli, slow_model: Path, tmp_path: Path
) -> None:
    with interrupted(corral, slow_model, tmp_path) as command:
        until(lambda: "Ctrl-C again" in (tmp_path / "err").read_text())
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
    until(lambda: batch(corral)["status"] == "cancelled")


def test_every_line_has_one_result_whenever_the_daemon_is_killed(
    corral: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    corral.configure(SETTINGS.format(path=tiny_model))
    daemon = corral.serve()
    assert corral.fork_server
    path = write(tmp_path / "some.jsonl", 40, max_tokens=32)
    command = corral.fork_server.start(["batch", "run", str(path)], corral.env, tmp_path, {})
    for done, number in ((1, signal.SIGKILL), (12, signal.SIGTERM), (25, signal.SIGKILL)):
        until(lambda: (one := batch(corral)) and one["request_counts"]["completed"] >= done)  # noqa: B023
        daemon.send_signal(number)
        daemon.wait()
        daemon = corral.serve()
    assert command.wait(60) == 0  # it has waited for each of them
    assert batch(corral)["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert ids(tmp_path / "some.output.jsonl") == [f"r{i}" for i in range(40)]


CHAT = "/v1/chat/completions"
ONE_SLOT = """
[models.tiny]
path = "{path}"
[models.tiny.flags]
parallel = 1
threads = 1
"""


def greedy_lines(path: Path, count: int, tokens: int, *, url: str = CHAT) -> Path:
    """Write a file of greedy requests, the ids r0, r1, …"""
    lines = []
    for i in range(count):
        body = {**chat(f"go {i}", tokens), "temperature": 0}
        if url != CHAT:
            body["prompt"] = f"go {i}" * 40
            del body["messages"]
        lines.append({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chat(text: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, "ignore_eos": True}


def decodes(corral: CorralCli) -> bool:
    found = httpx.get(f"{corral.url}/metrics", timeout=60).text.splitlines()
    return any(line.startswith("corral_slots_decode") and line.endswith(" 1.0") for line in found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_line_that_is_paused_when_the_daemon_ends_has_one_result(
    corral: CorralCli, slow_model: Path, tmp_path: Path, number: int
) -> None:
    corral.configure(ONE_SLOT.format(path=slow_model))
    daemon = corral.serve()
    assert corral.fork_server
    path = greedy_lines(tmp_path / "some.jsonl", 2, 150)
    command = corral.fork_server.start(["batch", "run", str(path)], corral.env, tmp_path, {})
    until(lambda: decodes(corral))
    url = f"{corral.url}{CHAT}"
    with httpx.stream("POST", url, json={**chat("now", 9000), "stream": True}, timeout=60) as now:
        next(now.iter_bytes())  # so the line has given up the only slot
        daemon.send_signal(number)
    daemon.wait()
    corral.serve()
    assert command.wait(60) == 0
    assert batch(corral)["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert ids(tmp_path / "some.output.jsonl") == ["r0", "r1"]


@pytest.mark.parametrize("url", [CHAT, "/v1/completions"])
def test_a_line_has_the_same_answer_with_and_without_a_pause(
    corral: CorralCli, smollm2: Path, tmp_path: Path, url: str
) -> None:
    corral.configure(ONE_SLOT.format(path=smollm2))
    corral.ok("start")
    found = []
    for name in ("paused", "alone"):
        path = greedy_lines(tmp_path / f"{name}.jsonl", 1, 80, url=url)
        assert corral.fork_server
        command = corral.fork_server.start(["batch", "run", str(path)], corral.env, tmp_path, {})
        while name == "paused" and command.poll() is None:
            httpx.post(f"{corral.url}{CHAT}", json=chat("now", 2), timeout=60)
        assert command.wait(60) == 0
        (line,) = (tmp_path / f"{name}.output.jsonl").read_text().splitlines()
        body = json.loads(line)["response"]["body"]
        found.append((body["choices"], body["usage"]["completion_tokens"]))
    assert found[0] == found[1]
    paused = [entry for entry in corral.data("requests", "--last", "1000") if entry["yields"]]
    # Nearly always the engine still has the tokens; else the answer would be computed again.
    assert paused
    assert all(2 * (entry["attempts"] - 1) <= entry["yields"] for entry in paused)


def test_the_key_comes_from_the_environment(
    corral: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.me]\nkey = "corral-me-1234"\n')
    proxy = f'[proxy]\nlisten = "127.0.0.1:0"\napi_keys_file = "{keys}"\n'
    corral.configure(SETTINGS.format(path=tiny_model) + proxy)
    corral.ok("start")
    path = write(tmp_path / "some.jsonl", 2)
    refused = corral("batch", "run", str(path))
    assert (refused.returncode, "CORRAL_API_KEY" in refused.stderr) == (1, True)
    corral.env["CORRAL_API_KEY"] = "corral-me-1234"
    assert corral("batch", "run", str(path)).returncode == 0
    assert ids(tmp_path / "some.output.jsonl") == ["r0", "r1"]
