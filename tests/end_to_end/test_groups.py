"""Three models with memory for all, two of which a group keeps apart."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, until

SETTINGS = """
[supervisor]
eviction_wait_s = 0.2
persist_slots = false

[models.a]
path = "{slow}"
min_residency_s = 0

[models.b]
path = "{tiny}"
min_residency_s = 0

[models.c]
path = "{tiny}"

[groups.large]
models = ["a", "b"]
max_loaded = 1
"""
RULE = "at most 1 of a, b may be loaded at the same time (groups.large)"


def post(corral: CorralCli, path: str, model: str) -> dict[str, Any]:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(corral.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return dict(json.load(response))


def test_a_group_loads_one_of_its_models_at_a_time_and_cuts_no_answer(
    corral: CorralCli, tiny_model: Path, slow_model: Path
) -> None:
    corral.configure(SETTINGS.format(slow=slow_model, tiny=tiny_model))
    assert RULE in corral.ok("plan", "b")
    corral.ok("start")
    assert corral.model_states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert RULE in corral.ok("status")
    estimate = post(corral, "/corral/v1/estimate", "b")
    assert (estimate["evicts"], estimate["group"]) == (["a"], "large")

    stream = begin_stream(corral, 150, "a")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(post, corral, "/v1/chat/completions", "b")
        until(lambda: f"b: 1 waiting until others are unloaded: {RULE}" in corral.ok("status"))
        assert stream.read().rstrip().endswith(b"data: [DONE]")
        assert asked.result(PATIENCE_S)["model"] == "b"
    assert corral.model_states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
    until(lambda: "by the rule of groups.large, other models had" in corral.ok("explain"))
    assert corral.events("model.unloaded")[-1]["reason"] == f"b was requested: {RULE}"
