"""Conversations outlive their model and their daemon."""

import http.client
import json
import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.corral_cli import CorralCli, until
from support.fork_server import ForkServer

WORDS = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "engine", "music")
SMALL = "[models.chat.flags]\nthreads = 1\nctx-size = 8192\nparallel = 2\n"


def configure(corral: CorralCli, model: Path, more: str = "") -> None:
    corral.configure(f'[models.chat]\npath = "{model}"\n{SMALL}\n{more}')


def turn(
    corral: CorralCli, messages: list[dict[str, str]], model: str = "chat"
) -> tuple[list[dict[str, str]], Any]:
    """Return the conversation with its next turn, and the engine's timings."""
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    said = answer["choices"][0]["message"]["content"]
    then = [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    return [*messages, *then], answer["timings"]


def warm_by_page(corral: CorralCli, system: str) -> tuple[int, Any]:
    """Prefill a prompt by the proxy's endpoint; return status and body."""
    server = urlsplit(corral.url)
    body = {"messages": [{"role": "system", "content": system}]}
    with closing(http.client.HTTPConnection(server.netloc)) as connection:
        connection.request("POST", "/corral/v1/models/chat/warm", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.load(response)


def test_a_stopped_model_has_one_code_whoever_asks(corral: CorralCli, tiny_model: Path) -> None:
    configure(corral, tiny_model)
    corral.ok("start")
    corral.ok("stop", "chat")
    paths = ("/v1/chat/completions", "/corral/v1/models/chat/warm", "/models/load")
    body = {"model": "chat", "messages": [{"role": "system", "content": "Be kind."}]}
    for path in paths:
        response = httpx.post(f"{corral.url}{path}", json=body, timeout=60)
        assert (path, response.status_code) == (path, 503)
        assert (path, response.json()["error"]["code"]) == (path, "model_failed")
    corral.ok("start", "chat")
    assert httpx.post(f"{corral.url}{paths[1]}", json=body, timeout=60).status_code == 200


def story(words: int) -> list[dict[str, str]]:
    chance = random.Random(words)  # noqa: S311 (the same story each time)
    return [{"role": "user", "content": " ".join(chance.choices(WORDS, k=words))}]


def test_a_long_conversation_is_restored_after_a_restart(
    corral: CorralCli, tiny_model: Path
) -> None:
    configure(corral, tiny_model)
    corral.ok("start")
    messages, cold = turn(corral, story(300))
    held = cold["prompt_n"] + cold["predicted_n"]
    assert held > 1000
    corral.ok("stop")
    corral.ok("start")
    messages, warm = turn(corral, messages)
    assert warm["cache_n"] >= 0.95 * held
    corral.ok("stop", "chat")
    corral.ok("start", "chat")
    _, again = turn(corral, messages)
    assert again["cache_n"] >= 0.95 * held


def test_a_model_whose_name_has_a_slash_is_served_and_restored(
    corral: CorralCli, tiny_model: Path
) -> None:
    name = "qwen/tiny:q4"
    corral.configure(
        f'[models."{name}"]\npath = "{tiny_model}"\n{SMALL}'.replace("chat", f'"{name}"')
    )
    corral.ok("start", name)
    messages, cold = turn(corral, story(300), name)
    for path in (f"models/{name}", "models/qwen%2Ftiny%3Aq4"):
        with urllib.request.urlopen(f"{corral.url}/v1/{path}", timeout=60) as response:
            assert json.load(response)["id"] == name
    corral.ok("restart", name)
    _, warm = turn(corral, messages, name)
    assert warm["cache_n"] >= 0.95 * (cold["prompt_n"] + cold["predicted_n"])
    assert {found["model"] for found in corral.data("slots", "list")} == {name}
    assert [Path(file).name for file in corral.data("logs", name)["files"]] == [
        "qwen%2Ftiny:q4.0.log"
    ]
    assert sorted(path.name for path in (corral.root / "run").glob("*.0.sock")) == [
        "qwen%2Ftiny:q4.0.sock"
    ]
    corral.ok("stop", name)


def test_saved_slots_survive_a_killed_daemon(corral: CorralCli, tiny_model: Path) -> None:
    configure(corral, tiny_model)
    daemon = corral.serve()
    messages, _ = turn(corral, story(200))
    (kept,) = corral.data("slots", "save", "chat")
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    until(lambda: not corral.engines())
    corral.serve()
    _, timings = turn(corral, messages)
    assert timings["cache_n"] > 0.9 * kept["tokens"]


def test_saved_slots_are_listed_and_deleted_without_a_daemon(
    corral: CorralCli, tiny_model: Path
) -> None:
    configure(corral, tiny_model)
    corral.ok("start")
    messages, _ = turn(corral, story(200))
    (saved,) = corral.data("slots", "save", "chat")
    assert f"1 conversation, {saved['tokens']} tokens" in corral.ok("slots")
    forgotten = corral.ok("slots", "forget", "--conversation", saved["name"][:6])
    assert "1 slot file" in forgotten
    assert "emptied slots: 1" in forgotten
    assert not corral.data("slots", "list")
    _, again = turn(corral, messages)
    assert again["cache_n"] < 50  # no tier has it
    assert corral("slots", "forget", "--conversation", "none").returncode == 4
    corral.ok("stop")
    (kept,) = corral.data("slots", "list")
    assert (kept["model"], kept["replica"]) == ("chat", 0)
    assert str(kept["tokens"]) in corral.ok("slots", "list")
    assert corral("slots", "forget").returncode == 78
    assert corral.data("slots", "forget", "other") == []
    assert [slot["name"] for slot in corral.data("slots", "forget", "chat")] == [kept["name"]]
    assert "no saved conversations" in corral.ok("slots", "list")
    assert not [path for path in (corral.root / "data" / "slots").rglob("*") if path.is_file()]


def test_a_command_prefills_a_prompt(corral: CorralCli, tiny_model: Path) -> None:
    configure(corral, tiny_model)
    (corral.root / "kind.txt").write_text("be kind")
    assert corral("warm", "chat", "kind.txt").returncode == 3
    corral.ok("start")
    assert "tokens prefilled" in corral.ok("warm", "chat", "kind.txt")
    (warmed,) = corral.data("warm", "chat", "kind.txt")
    assert warmed["instance"] == "chat.0"
    status, answer = warm_by_page(corral, "be kind")
    assert (status, answer["data"][0]["instance"]) == (200, "chat.0")
    assert answer["data"][0]["cached"] > 0
    assert corral("warm", "other", "kind.txt").returncode == 4
    assert corral("warm", "chat", "none.txt").returncode == 78
    assert "no idle slot was worth saving" in corral.ok("slots", "save")
    assert corral("slots", "save", "other").returncode == 4
    corral.ok("stop", "chat")
    status, answer = warm_by_page(corral, "be kind")
    assert (status, answer["error"]["code"]) == (503, "model_failed")


def test_configured_prompts_are_prefilled_at_each_start(
    corral: CorralCli, tiny_model: Path
) -> None:
    (corral.root / "config").mkdir()
    (corral.root / "config" / "kind.txt").write_text("be kind")
    corral.configure(f'[models.chat]\npath = "{tiny_model}"\nwarm_prompts = ["kind.txt"]\n{SMALL}')
    corral.ok("start")
    log = (corral.root / "log" / "daemon.log").read_text()
    assert log.count('"prompt.prefilled"') == 1


def test_a_replacement_restores_the_slots_of_its_predecessor(
    corral: CorralCli, tiny_model: Path
) -> None:
    configure(corral, tiny_model, "cache-ram = 64")
    corral.ok("start")
    messages, cold = turn(corral, story(200))
    configure(corral, tiny_model, "cache-ram = 65")
    assert corral.data("reload")["changed"] == ["chat.0"]
    _, warm = turn(corral, messages)
    assert warm["cache_n"] > 0.9 * cold["prompt_n"]


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[CorralCli]:
    other = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    yield other
    other.end()


# The tiny model computes a prompt about as soon as a file is read, which then may not pay.
def test_daemons_that_share_a_directory_continue_conversations_of_each_other(
    corral: CorralCli, other: CorralCli, slow_model: Path, tmp_path: Path
) -> None:
    for daemon in (corral, other):
        configure(daemon, slow_model, f'[supervisor]\nslots_directory = "{tmp_path / "shared"}"')
        daemon.serve()
    messages, first = turn(corral, [{"role": "user", "content": " ".join(WORDS * 20)}])
    corral.ok("stop")
    messages[-1]["content"] = " ".join(reversed(WORDS * 20))
    messages, second = turn(other, messages)
    assert second["cache_n"] >= first["prompt_n"]

    corral.serve()  # it begins with its own file, of the first turn
    other.ok("slots", "save")
    other.kill()
    _, third = turn(corral, messages)
    assert third["cache_n"] >= second["cache_n"] + second["prompt_n"]
    (saved,) = corral.data("slots", "save")  # the file of the latest turn replaces the others
    assert saved["tokens"] > third["cache_n"]


def test_commands_say_that_a_shared_directory_cannot_be_read(
    corral: CorralCli, tiny_model: Path
) -> None:
    shared = corral.root / "shared"
    configure(corral, tiny_model, f'[supervisor]\nslots_directory = "{shared}"')
    corral.ok("start")
    messages, _ = turn(corral, story(200))
    corral.ok("slots", "save")
    unreadable = shared / "kept" / "chat" / "0123456789abcdef.json"
    unreadable.mkdir()
    turn(corral, story(100))
    reason = f"cannot list the files in {shared}: Is a directory"
    for words in ("save", "list", "forget --all", ""):
        done = corral("slots", *words.split())
        assert (done.returncode, reason in done.stderr) == (1, True), done.stderr
    assert "Is a directory" in corral("doctor").stdout
    assert f"conversations are not saved across restarts: {reason}" in corral.ok("plan", "chat")
    until(lambda: corral.events("slots.files_unreadable"))
    assert not corral.events("slots.quarantined")
    unreadable.rmdir()
    assert len(corral.data("slots", "list")) == 2
    corral.ok("restart")
    _, timings = turn(corral, messages)
    assert timings["cache_n"] > 200


@pytest.fixture
def four(corral: CorralCli, fork_server: ForkServer) -> Iterator[list[CorralCli]]:
    """Four daemons; the directories of the others are in that of the first."""
    others = [CorralCli(corral.root / name, fork_server) for name in ("2", "3", "4")]
    for other in others:
        other.root.mkdir()
    yield [corral, *others]
    for other in others:
        other.end()


def test_four_daemons_write_and_read_one_directory_at_once(
    four: list[CorralCli], slow_model: Path, tmp_path: Path
) -> None:
    for daemon in four:
        configure(daemon, slow_model, f'[supervisor]\nslots_directory = "{tmp_path / "shared"}"')
        daemon.serve()
    assert [len(daemon.engines()) for daemon in four] == [1] * 4
    with ThreadPoolExecutor(len(four)) as pool:
        talks = [story(150 + number) for number in range(len(four))]
        for moved in range(3):
            daemons = [*four[moved:], *four[:moved]]
            turns = [*pool.map(turn, daemons, talks)]
            if moved:
                assert all(timings["cache_n"] > 4 * timings["prompt_n"] for _, timings in turns)
            talks = [messages for messages, _ in turns]
            assert all(pool.map(lambda daemon: daemon.ok("slots", "save"), daemons))
    four[3].kill()
    _, timings = turn(four[0], talks[1])
    assert timings["cache_n"] > 4 * timings["prompt_n"]
    files = [*(tmp_path / "shared" / "kept" / "chat").iterdir()]
    names = {f"{file.stem}{ending}" for file in files for ending in (".json", ".slot")}
    assert {file.name for file in files} == names
