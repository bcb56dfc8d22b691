"""Requests that crash the real engine, and their effect on other requests."""

import http.client
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support import tiny_gguf
from support.corral_cli import CorralCli, begin_stream, until

LIFTED = """
[proxy]
listen = "127.0.0.1:0"
[proxy.limits]
grammar_bytes = 100_000_000
grammar_depth = 100_000_000
grammar_rules = 100_000_000
grammar_alternatives = 100_000_000
pattern_bytes = 100_000_000
trigger_patterns = 100
grammar_stacks = 2_147_483_647
schema_depth = 100_000_000
schema_values = 100_000_000
[supervisor.restart]
backoff_initial_s = 0.01
"""


@pytest.fixture(scope="session")
def slow_random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose text a seed decides; it takes a second for an answer."""
    path = tmp_path_factory.mktemp("models") / "random.gguf"
    return tiny_gguf.make(path, embd=256, heads=8, kv_heads=2, layers=12, ff=1024, ctx=8192)


def parentheses(text: str = "a") -> str:
    return "(" * 100_000 + text + ")" * 100_000


def chained(count: int) -> str:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(count))
    return f'root ::= r0\n{rules}\nr{count} ::= "a"'


# Each ends build 10434 with SIGSEGV.
POISONS: dict[str, dict[str, Any]] = {
    "parentheses": {"grammar": f"root ::= {parentheses(chr(34) + 'a' + chr(34))}"},
    "chained rules": {"grammar": chained(120_000)},
    "pattern of a schema": {"json_schema": {"type": "string", "pattern": f"^{parentheses()}$"}},
    "trigger": {
        "grammar": 'root ::= "a"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 2, "value": parentheses()}],
    },
}
# These keep it busy for longer than anybody waits, or are refused for their nesting alone.
BUSY: dict[str, dict[str, Any]] = {
    "optional properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(2000)},
        }
    },
}
DEEP = b'{"model":"m","prompt":"a","n_predict":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def post(url: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    """Ask for a completion; return its status, and the code of an error."""
    if isinstance(body, dict):
        body = json.dumps({"model": "m", "prompt": "a", "n_predict": 1, **body}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completion", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]


def pids(corral: CorralCli) -> dict[str, int | None]:
    """Return the process of each instance."""
    return {instance: facts.pid for instance, facts in corral.instances().items()}


def settled(corral: CorralCli) -> bool:
    """Return whether all instances serve."""
    return {instance.state for instance in corral.instances().values()} == {"ready"}


def test_by_default_no_crashing_request_reaches_an_engine(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(f'[models.m]\npath = "{tiny_model}"\n')
    corral.ok("start")
    url, before = corral.url, corral.instances()["m.0"].pid
    for members in (POISONS | BUSY).values():
        assert post(url, members) == (400, "limit_exceeded")
    assert post(url, DEEP)[0] == 400
    assert post(url, {}) == (200, "")
    assert corral.instances()["m.0"].pid == before


@pytest.mark.parametrize("name", ["parentheses", "trigger"])
def test_a_crashing_request_is_rejected_the_third_time(
    corral: CorralCli, slow_model: Path, name: str
) -> None:
    corral.configure(f'{LIFTED}[models.m]\npath = "{slow_model}"\nreplicas = 2\n')
    corral.ok("start")
    url = corral.url
    with begin_stream(corral, 30_000, "m") as innocent:
        serves = innocent.headers["X-Corral-Instance"]
        after = pids(corral)
        for _ in range(2):
            before = after
            assert post(url, POISONS[name]) == (502, "upstream_crashed")
            until(lambda: settled(corral))
            after = pids(corral)
            assert [entry for entry in after if after[entry] != before[entry]] == [
                *after.keys() - {serves}
            ]
        assert post(url, POISONS[name]) == (422, "crashes_engine")
        assert post(url, {}) == (200, "")
        assert pids(corral) == after
        assert innocent.readline()


def test_crashes_by_requests_never_end_in_failed(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'{LIFTED}[models.m]\npath = "{tiny_model}"\n')
    corral.ok("start")
    url = corral.url
    for number in range(6):  # five faults of its own would end in `failed`
        poison = {"prompt": str(number), **POISONS["parentheses"]}
        assert post(url, poison) == (502, "upstream_crashed")
        until(lambda: settled(corral))
    assert post(url, {}) == (200, "")
    assert corral.instances()["m.0"].failures > 0


def ask_stream(corral: CorralCli, **members: object) -> http.client.HTTPResponse:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": 250, **members}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60)
    return response


def text_of(stream: str) -> str:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line[:5] == "data:"]
    assert lines.pop() == "[DONE]", stream[-300:]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    ("replicas", "members"), [(1, {"temperature": 0}), (2, {"seed": 42, "temperature": 1.5})]
)
def test_a_chat_whose_engine_is_killed_goes_on_as_if_it_was_not(
    corral: CorralCli, slow_random_model: Path, replicas: int, members: dict[str, object]
) -> None:
    """Greedy and seeded chats are the same to the last letter if the engine repeats its bits."""
    # With some CPU libraries a token's bits depend on what shares its batch, so prompts are whole.
    members = {**members, "cache_prompt": False}
    corral.configure(f'[models.m]\npath = "{slow_random_model}"\nreplicas = {replicas}\n')
    corral.ok("start")
    with ask_stream(corral, **members) as stream:
        expected = text_of(stream.read().decode())
    pids = {name: instance.pid for name, instance in corral.instances().items()}
    with ask_stream(corral, **members) as stream:
        begun = b"".join(stream.readline() for _ in range(10))
        os.kill(pids[stream.headers["X-Corral-Instance"]] or 0, signal.SIGKILL)
        text = text_of((begun + stream.read()).decode())
    assert text == expected
    until(lambda: settled(corral))
    with urllib.request.urlopen(f"{corral.url}/metrics") as metrics:
        lines = metrics.read().decode().splitlines()
    counted = [line for line in lines if line.startswith("corral_continued_answers_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 1


def test_a_model_that_is_killed_often_serves_again(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'{LIFTED}[models.m]\npath = "{tiny_model}"\n')
    corral.ok("start")
    for _ in range(6):
        until(lambda: settled(corral))
        os.kill(corral.instances()["m.0"].pid or 0, signal.SIGKILL)
        assert post(corral.url, {}) == (200, "")
    assert "killed" in {event["reason"] for event in corral.events("instance.state_changed")}
    assert not corral.events("instance.failed")
