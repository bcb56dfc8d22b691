"""`/corral/v1/estimate` and `Prefer: wait` with the real engine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import CorralCli, begin_stream, until


def test_an_estimate_tells_of_the_queue_and_of_the_load(
    corral: CorralCli, slow_model: Path
) -> None:
    flags = "{ ctx-size = 4096, parallel = 1, threads = 1 }"
    corral.configure(f'[models.m]\npath = "{slow_model}"\nflags = {flags}\n')
    corral.ok("start")
    assert estimate(corral)["first_token_s"] is None
    send(corral, "/v1/chat/completions", max_tokens=20, ignore_eos=True)
    assert estimate(corral)["first_token_s"] > 0
    with begin_stream(corral, 30_000, "m") as stream:
        until(lambda: b'"content"' in stream.readline())
        found = estimate(corral)
        assert found["queue_s"] > 1
        error = refused(corral)
        assert error["code"] == "wait_too_long"
        assert "in the queue" in error["message"]
    corral.ok("unload", "m")
    found = estimate(corral)
    assert found["must_load"]
    assert 0 < found["load_s"] <= found["first_token_s"]
    assert corral.data("status")["models"][0]["instances"][0]["state"] == "stopped"


def estimate(corral: CorralCli) -> dict[str, Any]:
    return send(corral, "/corral/v1/estimate")


def refused(corral: CorralCli) -> dict[str, str]:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        send(corral, "/v1/chat/completions", "wait=1")
    assert refusal.value.code == 503
    assert refusal.value.headers["Preference-Applied"] == "wait=1"
    error: dict[str, str] = json.load(refusal.value)["error"]
    return error


def send(corral: CorralCli, path: str, prefer: str = "wait=600", **members: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **members}
    request = urllib.request.Request(
        corral.url + path, json.dumps(body).encode(), {"Prefer": prefer}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
