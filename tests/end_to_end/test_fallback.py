"""A stopped model's chats are answered by another one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support import tiny_bert
from support.corral_cli import CorralCli

SETTINGS = """
[models.chat]
path = "{path}"
fallback = ["small"]

[models.small]
path = "{path}"
fallback = ["chat"]
"""


def ask(url: str, path: str, **members: Any) -> tuple[Any, Any]:
    """Return the body and the header of the answer to a request for the model chat."""
    body = {"model": "chat", "max_tokens": 3, **members}
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response), response.headers


def test_a_stopped_models_chats_are_answered_by_the_other(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(SETTINGS.format(path=tiny_model))
    corral.ok("start")
    messages = [{"role": "user", "content": "hello"}]
    answer, headers = ask(corral.url, "/v1/chat/completions", messages=messages)
    assert (answer["model"], headers["X-Corral-Fallback"]) == ("chat", None)
    corral.ok("stop", "chat")
    for path, key in (("/v1/chat/completions", "choices"), ("/v1/messages", "content")):
        answer, headers = ask(corral.url, path, messages=messages)
        assert (answer["model"], headers["X-Corral-Fallback"]) == ("small", "small")
        assert answer[key]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(corral.url, "/v1/completions", prompt="hello")
    with refused.value as failed:
        assert failed.code == 503


def test_a_model_that_makes_embeddings_is_no_fallback(corral: CorralCli, tmp_path: Path) -> None:
    vectors = tiny_bert.make(tmp_path / "vectors.gguf", "mean")
    corral.configure(SETTINGS.format(path=vectors))
    failed = corral("config", "check")
    assert failed.returncode == 78
    assert "makes embeddings or ranks texts, no chats" in failed.stderr
