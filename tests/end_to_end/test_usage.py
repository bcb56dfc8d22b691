"""Usage by key equals the responses' figures, survives a killed daemon, and holds no text."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import httpx
import psutil
from support.corral_cli import CorralCli, until

SETTINGS = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "{keys}"
[models.chat]
path = "{model}"
flags = {{ parallel = 2, ctx-size = 2048, threads = 1 }}
"""


TOO_LONG = "context_length_exceeded"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(url: str, key: str, **members: Any) -> dict[str, Any]:
    body = {"model": "chat", "max_tokens": 8, **members}
    answer: dict[str, Any] = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=bearer(key), timeout=60
    ).json()
    return answer


def test_each_key_has_its_own_usage(corral: CorralCli, tiny_model: Path) -> None:
    keys = corral.root / "config" / "keys.toml"
    corral.configure(SETTINGS.format(keys=keys, model=tiny_model))
    anna, ben = (corral.data("key", "add", name)["key"] for name in ("anna", "ben"))
    cora = corral.data("key", "add", "cora", "--tokens-per-day", "60", "--max-context", "200")[
        "key"
    ]
    dora = corral.data("key", "add", "dora", "--max-context", "200")["key"]
    assert corral.ok("usage") == "no usage is recorded\n"
    corral.ok("start")
    word = secrets.token_hex(8)
    said = [{"role": "user", "content": f"{word} and more"}]
    first = ask(corral.url, anna, messages=said)["usage"]
    second = ask(corral.url, anna, messages=said, n=2)["timings"]
    ask(corral.url, ben, messages=said)
    until(lambda: len(corral.data("usage", "--by", "key", "--key", "ben")) == 1)
    until(lambda: "(warming)" in corral.ok("usage", "--internal"))
    folded = corral.ok("usage").splitlines()
    assert [line.split()[0] for line in folded[1:]] == ["anna", "ben", "(internal)", "total"]
    seen = httpx.get(f"{corral.url}/corral/v1/usage", headers=bearer(ben), params={"key": "anna"})
    assert [entry["key"] for entry in seen.json()["usage"]] == ["ben"]
    metrics = httpx.get(f"{corral.url}/metrics", headers=bearer(ben)).text
    assert 'corral_client_requests_total{client="ben",model="chat"} 1' in metrics
    assert 'client="anna"' not in metrics
    for by, status in (("day,key", 200), ("day,day", 400), ("hour", 400)):
        summed = httpx.get(f"{corral.url}/corral/v1/usage", headers=bearer(ben), params={"by": by})
        assert summed.status_code == status, summed.text
    assert ask(corral.url, cora, messages=said, max_tokens=200)["error"]["code"] == TOO_LONG
    # The engine counts more tokens than were estimated.
    long = [{"role": "user", "content": "0123456789 " * 25}]
    assert ask(corral.url, dora, messages=long)["error"]["code"] == TOO_LONG
    assert ask(corral.url, cora, messages=said)["usage"]["total_tokens"] > 40
    until(lambda: "error" in ask(corral.url, cora, messages=said))
    kill(corral)
    (found,) = corral.data("usage", "--by", "key", "--key", "anna")
    cached = first["prompt_tokens_details"]["cached_tokens"]
    computed = first["prompt_tokens"] - cached + second["prompt_n"]
    assert found["requests"] == 2
    assert (found["prompt_tokens"], found["generated_tokens"]) == (computed, 8 + 2 * 8)
    assert found["cached_tokens"] == cached + second["cache_n"]
    assert found["slot_seconds"] > 0
    files = [path for path in (corral.root / "data" / "history").iterdir() if path.is_file()]
    assert files
    assert not [path for path in files if word.encode() in path.read_bytes()]
    corral.ok("start")
    refused = ask(corral.url, cora, messages=said)["error"]
    assert "limited to 60 tokens a day" in refused["message"]
    ask(corral.url, anna, messages=said)
    corral.ok("stop")
    assert [usage["requests"] for usage in corral.data("usage", "--key", "anna")] == [3]
    assert corral.ok("usage", "--by", "month", "--csv").startswith("month,requests,")
    assert corral("usage", "--since", "yesterday").returncode == 78


def test_no_answer_is_missing_whose_client_has_it_when_the_daemon_is_killed(
    corral: CorralCli, tiny_model: Path
) -> None:
    keys = corral.root / "config" / "keys.toml"
    corral.configure(SETTINGS.format(keys=keys, model=tiny_model))
    anna = corral.data("key", "add", "anna")["key"]
    said = {"messages": [{"role": "user", "content": "a word"}], "max_tokens": 8}
    for number, is_stream in enumerate((True, False, True), 1):
        corral.ok("start")
        ask(corral.url, anna, **said)
        body = {"model": "chat", "stream": is_stream, **said}
        receive_all(corral.url, anna, body)
        kill(corral)
        (found,) = corral.data("usage", "--key", "anna")
        assert (found["requests"], found["generated_tokens"]) == (2 * number, 2 * 8 * number)


def kill(corral: CorralCli) -> None:
    daemon = psutil.Process(corral.daemon_pid)
    daemon.kill()
    until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE)


def receive_all(url: str, key: str, body: dict[str, Any]) -> None:
    """Return as soon as the last byte of a response has arrived."""
    with (
        httpx.Client(base_url=url, headers=bearer(key), timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for _ in response.iter_raw():
            pass


def test_nothing_is_recorded_where_that_is_off(corral: CorralCli, tiny_model: Path) -> None:
    off = "[supervisor]\nrecord_usage = false\n"
    corral.configure(f'{off}[models.chat]\npath = "{tiny_model}"\nflags = {{ threads = 1 }}')
    corral.ok("start")
    ask(corral.url, "none", messages=[{"role": "user", "content": "hello"}])
    corral.ok("stop")
    assert corral.ok("usage") == "no usage is recorded\n"
