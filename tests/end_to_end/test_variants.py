"""A variant of a model: the same process and the same cache, with other request defaults."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import CorralCli

VARIANTS = """
[models.chat]
path = "{path}"
aliases = ["talk"]
flags = {{ parallel = 1, ctx-size = 2048 }}
[models.chat.variants.short]
max_tokens = 3
[models.chat.variants.seven]
set = {{ max_tokens = 7, temperature = 0 }}
"""


def ask(url: str, model: str, **members: Any) -> Any:
    messages = [{"role": "user", "content": "hello in there, who is on the other side?"}]
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps({"model": model, "messages": messages, **members}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_variant_changes_requests_and_nothing_else(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(VARIANTS.format(path=tiny_model))
    corral.ok("start")
    (engine,) = corral.engines()
    url = corral.url
    assert ask(url, "chat", max_tokens=5)["usage"]["completion_tokens"] == 5
    short = ask(url, "chat:short")
    assert short["usage"]["completion_tokens"] == 3
    assert short["timings"]["cache_n"] > 10
    assert ask(url, "talk:short", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert ask(url, "chat:seven", max_tokens=4)["usage"]["completion_tokens"] == 7
    assert corral.engines() == [engine]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        listed = {entry["id"]: entry for entry in json.load(response)["data"]}
    assert list(listed) == ["chat", "chat:short", "chat:seven"]
    assert listed["chat:short"]["status"]["value"] == "loaded"


def test_an_unknown_variant_is_rejected_with_the_nearest_name(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(VARIANTS.format(path=tiny_model))
    corral.serve()
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(corral.url, "chat:sort")
    with refused.value as answer:
        assert answer.code == 404
        assert "did you mean chat:short?" in answer.read().decode()


def test_ambiguous_names_are_rejected_before_a_start(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(VARIANTS.format(path=tiny_model) + f'[models.talk]\npath = "{tiny_model}"\n')
    failed = corral("config", "check")
    assert failed.returncode == 78
    assert "models.chat: the name talk belongs to the model talk" in failed.stderr
