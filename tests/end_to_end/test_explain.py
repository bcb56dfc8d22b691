"""`corral explain` names a client's change, from figures alone, also without a daemon."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, until

RULES = "Answer briefly, and only what you know of the river by the old stone bridge. " * 8
CANARY = "xylophagous"


def ask(corral: CorralCli, system: str, *more: dict[str, str]) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": RULES}, *more]
    body = {"model": "chat", "messages": messages, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Corral-Explain": "1"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_a_changed_system_prompt_is_explained(corral: CorralCli, tiny_model: Path) -> None:
    flags = "flags = { ctx-size = 4096, parallel = 2, threads = 1 }"
    corral.configure(f'[models.chat]\npath = "{tiny_model}"\n{flags}\n')
    corral.ok("start")
    assert corral("explain").returncode == 4
    first = ask(corral, RULES)
    assert first["corral"]["cause"] == "first_request"
    said = first["choices"][0]["message"]
    asked = {"role": "user", "content": f"And what is {CANARY}?"}
    told = ask(corral, f"{RULES[:300]}It is ten. {RULES[300:]}", said, asked)["corral"]
    assert told["cause"] == "system_prompt_changed"
    assert (told["cache"]["message"], told["cache"]["earlier"]) == (0, first["corral"]["request"])
    url = f"{corral.url}/corral/v1/requests/{told['request']}/explanation"
    with urllib.request.urlopen(url, timeout=60) as response:
        assert json.load(response)["sentence"] == told["sentence"]
    assert corral.data("explain", told["request"])["cache"] == told["cache"]
    corral.ok("stop")
    assert corral.ok("explain").lower().startswith(told["sentence"].lower())
    kept = [path.read_bytes() for path in corral.root.rglob("*") if path.is_file()]
    assert not any(CANARY.encode() in entry for entry in kept)
    assert "no request has the id nothing" in corral("explain", "nothing").stderr


def test_what_a_client_changes_is_gathered_and_a_rule_undoes_it(
    corral: CorralCli, tiny_model: Path
) -> None:
    flags = "flags = { ctx-size = 4096, parallel = 1, threads = 1 }"
    corral.configure(f'[models.chat]\npath = "{tiny_model}"\n{flags}\n')
    corral.ok("start")

    def dated(day: int) -> str:
        rules = RULES.replace(". ", ".\n")
        return f"{RULES[:300]}\nToday's date: 2026-11-{day}\n{rules}"

    *_, plain = [ask(corral, dated(day))["corral"] for day in (21, 22, 23)]
    found = corral.data("explain", "--client", "127.0.0.1")
    assert "no requests of editor" in corral.ok("explain", "--client", "editor")
    (change,) = found["changes"]
    assert (change["role"], change["message"], change["kind"]) == ("system", 0, "date")
    assert dated(21)[change["start"] : change["end"]] == "2026-11-21"
    assert (change["conversations"], change["turns"], found["rules"]) == (2, 0, ["move:date"])
    assert change["tokens"] > 0
    output = corral.root / "prompts.capture.jsonl"
    words = ("capture", "--model", "chat", "--max-requests", "1", "--output", str(output))
    assert corral.fork_server
    capture = corral.fork_server.start(words, corral.env, corral.root, {})
    until(lambda: corral.events("capture.started"))
    ask(corral, dated(24))
    assert capture.wait() == 0
    shown = corral.ok("explain", "--capture", str(output), "--rule", "move:date")
    assert "-Today's date: 2026-11-24" in shown
    assert "+Today's date: 2026-11-24" in shown
    key = 'proxy.prompt_rules."127.0.0.1"'
    corral.ok("config", "set", key, '["move:date"]')
    corral.ok("reload")
    ask(corral, dated(24))
    ruled = ask(corral, dated(25))["corral"]
    assert ruled["rules"] == ["move:date"]
    assert ruled["cache"]["found"] > 2 * plain["cache"]["found"]
    assert "prompt rules of its client changed it: move:date" in corral.ok("explain")
    corral.ok("config", "unset", key)
    corral.ok("reload")
    assert ask(corral, dated(26))["corral"]["rules"] == []

    # Several lines are found, and moved, as one is.
    def listed(*files: str) -> str:
        lines = "\n".join(("<files>", *files, "</files>"))
        return f"{RULES[:300]}\n{lines}\n{RULES}"

    for files in (("river.py",), ("stone.py", "lake.py"), ("bank.py",)):
        plain = ask(corral, listed(*files))["corral"]
    found = corral.data("explain", "--client", "127.0.0.1")
    blocks = [change for change in found["changes"] if change["kind"] == "block"]
    assert [change["rules"] for change in blocks] == [["move:block"]]
    corral.ok("config", "set", key, '["move:block"]')
    corral.ok("reload")
    ask(corral, listed("sea.py"))
    ruled = ask(corral, listed("hill.py", "wood.py"))["corral"]
    assert ruled["rules"] == ["move:block"]
    assert ruled["cache"]["found"] > 2 * plain["cache"]["found"]
