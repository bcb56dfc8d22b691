"""`corral explain` names what a client changed, from figures alone, also without a daemon."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli

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
