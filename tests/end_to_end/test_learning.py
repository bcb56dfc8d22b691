"""Shared prefixes of conversations are learned, and prefilled after a restart."""

from __future__ import annotations

import json
import stat
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli

LONG = " is kind and looks at the moon, at the river and at the stone" * 24
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXTS = {"name": "weather", "description": "Tell the weather."}
TEMPLATE = Path(__file__).parent.parent / "clients" / "tools.jinja"
SETTINGS = """
[supervisor]
persist_slots = false
[models.chat]
path = "{model}"
learn_prompts = true
[models.chat.flags]
chat-template-file = "{template}"
parallel = 4
ctx-size = 16384
threads = 1
"""


def chat(asked: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "A" + LONG}, {"role": "user", "content": asked}]
    tool = {"type": "function", "function": {**TEXTS, "parameters": SCHEMA}}
    return {"messages": messages, "tools": [tool], "max_tokens": 2}


def messages(asked: str) -> dict[str, Any]:
    system = [{"type": "text", "text": "B"}, {"type": "text", "text": LONG}]
    tool = {**TEXTS, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    said = [{"role": "user", "content": asked}]
    return {"system": system, "messages": said, "tools": [tool], "max_tokens": 2}


def responses(asked: str) -> dict[str, Any]:
    return {"instructions": "C" + LONG, "input": asked, "max_output_tokens": 2}


PAGES = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


def cached_share(url: str, page: str, asked: str) -> float:
    """Start a conversation; return the cached share of its prompt."""
    body = {"model": "chat", **PAGES[page](asked)}
    request = urllib.request.Request(
        f"{url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        usage = json.load(response)["usage"]
    match usage:
        case {"cache_read_input_tokens": cached, "input_tokens": computed}:
            return float(cached / (cached + computed))
        case {"input_tokens_details": {"cached_tokens": cached}, "input_tokens": whole}:
            return float(cached / whole)
        case _:
            return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_shared_prefixes_are_prefilled_after_a_restart(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(model=tiny_model, template=TEMPLATE))
    corral.ok("start")
    url = corral.url
    for page in PAGES:
        for asked in ("one", "two", "three"):
            cached_share(url, page, asked)
    corral.ok("stop")
    prompts = corral.root / "data" / "prompts"
    kept = list(prompts.rglob("*.json"))
    assert len(kept) == len(PAGES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    corral.ok("start")
    url = corral.url
    for page in PAGES:
        assert cached_share(url, page, "four") > 0.9, page
    assert "learned prompts of chat: 3" in corral("slots", "list").stderr
    assert "deleted learned prompts: 3" in corral("slots", "forget", "chat").stderr
    assert not list(prompts.rglob("*.json"))
