"""The curl lines of docs/http-api.md are answered as the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S, CorralCli

PAGE = Path(__file__).parents[2] / "docs/http-api.md"
ADDRESS = "http://127.0.0.1:8080"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text("utf-8"))
CURLS = [(line, "", "") for kind, line in BLOCKS if kind == "sh" and line.startswith("curl ")]
ANSWERED = [
    (line, kind, answer)
    for (_, line), (kind, answer) in pairwise(BLOCKS)
    if line.startswith("curl ") and kind in {"json", "text"}
]
ENDPOINTS = [
    "/generate",
    "/stream/generate",
    "/batch/generate",
    "/tokenize",
    "/batch/tokenize",
    "/v1/batch/completions",
    "/corral/v1/batch",
    "/v1/gpu/warmup",
    "/v1/gpu/status",
]


def members(value: Any) -> Any:
    """Return the names of all members, and the type of all else; a list as its first entry."""
    if isinstance(value, dict):
        return {name: members(found) for name, found in value.items()}
    return [members(value[0])] if isinstance(value, list) else type(value)


def names(events: str) -> list[tuple[str, Any]]:
    found = re.findall(r"event: (\w+)\ndata: (.+)\n", events)
    return [(name, members(json.loads(data))) for name, data in found]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_has_a_curl_line_and_its_answer(endpoint: str) -> None:
    assert any(f"{ADDRESS}{endpoint} " in line.replace("\n", " ") for line, _, _ in ANSWERED)


def test_every_curl_line_is_answered_as_the_page_says(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'[models.smollm2]\npath = "{tiny_model}"\nflags = {{ threads = 1 }}\n')
    corral.ok("start")
    for line, kind, answer in CURLS + ANSWERED:
        words = shlex.split(line.replace(ADDRESS, corral.url))
        done = subprocess.run(
            [*words, "-sS", "--fail-with-body"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if kind == "json":
            assert members(json.loads(done.stdout)) == members(json.loads(answer)), line
        if kind == "text":
            assert names(done.stdout) == names(answer), line
    corral.ok("stop")
