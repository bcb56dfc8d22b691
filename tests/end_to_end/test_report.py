"""A random word of prompts is in the logs of a verbose engine, and not in a report."""

from __future__ import annotations

import json
import secrets
import stat
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, until

SETTINGS = """
[supervisor]
persist_slots = false
[models.loud]
path = "{model}"
flags = {{ parallel = 1, ctx-size = 2048, threads = 1, verbosity = 5 }}
"""


def post(url: str, path: str, **body: Any) -> None:
    request = urllib.request.Request(
        f"{url}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer sk-secret0123456789"},
    )
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        error.read()


def send_everywhere(url: str, model: str, word: str) -> None:
    """Send requests with a word wherever an engine may write it into its log."""
    forged = f"{word}\n[llama-corral: run 1, 2026-11-22T23:16:22+00:00] {word}\n{word} {word}"
    messages = [{"role": "user", "content": forged}]
    tool = {"type": "function", "function": {"name": word, "parameters": {"type": word}}}
    for more in ({}, {"stream": True}, {"tools": [tool]}, {"grammar": word}, {"stop": [word]}):
        body = {"model": model, "messages": messages, "max_tokens": 2, **more}
        post(url, "/v1/chat/completions", **body)
    post(url, "/v1/chat/completions", model=model, messages=[{"role": word, "content": word}])
    post(url, "/v1/chat/completions", model=word, messages=messages)
    post(url, "/completion", model=model, prompt=forged, n_predict=2)


def texts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {
            name.partition("/")[2]: file.read().decode() for name, file in files.items() if file
        }


def test_a_word_of_prompts_is_in_no_report(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(model=tiny_model))
    corral.ok("start")
    word = f"zq{secrets.token_hex(6)}"
    send_everywhere(corral.url, "loud", word)
    path = corral.root / "log" / "loud.0.log"
    until(lambda: word in path.read_text("utf-8", "replace"))
    log = path.read_text("utf-8", "replace")
    path = corral.root / "it.tar.gz"
    told = corral.data("report", "--output", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = texts(path)
    assert [name for name, text in found.items() if word in text or "sk-secret" in text] == []
    assert {"README.txt", "doctor.txt", "status.json", "past_requests.jsonl"} <= found.keys()
    assert set(found["logs/loud.0.log"].splitlines()) & set(log.splitlines())
    assert "request.finished" in found["logs/daemon.jsonl"]
    assert told["files"].keys() == found.keys()
    assert corral("report", "--output", str(path)).returncode == 1
    corral.ok("stop")
    corral.configure("nonsense = [")
    later = corral.root / "later.tar.gz"
    corral.ok("report", "--with-prompts", "--output", str(later))
    found = texts(later)
    assert word in found["logs/loud.0.log"]
    assert "not running" in found["status.txt"]


def test_a_value_that_the_settings_refuse_is_in_no_report(
    corral: CorralCli, tmp_path: Path
) -> None:
    corral.configure('[proxy]\napi_keys_file = 7\n[models.a]\npath = "a"\nreplicas = "hunter2-x"\n')
    path = tmp_path / "report.tar.gz"
    corral.ok("report", "--output", str(path))
    found = texts(path)
    assert "models.a.replicas" in found["settings.txt"]
    assert "hunter2-x" not in "".join(found.values())
