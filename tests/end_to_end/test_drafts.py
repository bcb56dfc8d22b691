"""Drafts on the real engine: their acceptance is shown, and no batch is too small for them."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import tiny_gguf
from corral_cli import CorralCli, until

# A model that drafts for itself, and one that looks words up with a batch that holds none of them.
MODELS = """
[models.itself]
path = "{model}"
draft = "{model}"
[models.itself.flags]
parallel = 1
[models.words]
path = "{model}"
profile = "speculative"
[models.words.flags]
batch-size = 32
"""


def answer(url: str, model: str) -> Any:
    body = {"model": model, "prompt": "a b c d", "max_tokens": 520, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["timings"]


def drafts(corral: CorralCli) -> list[Any]:
    """The draft status of each model's first instance."""
    return [model["instances"][0]["draft"] for model in corral.status()["models"]]


def test_draft_acceptance_is_shown(corral: CorralCli, tmp_path: Path) -> None:
    model = tiny_gguf.make(tmp_path / "cycle.gguf", mode="cycle")
    corral.configure(MODELS.format(model=model))
    corral.ok("start")
    assert answer(corral.url, "words")["draft_n"] > 32
    answer(corral.url, "itself")
    until(lambda: all(draft["acceptance"] for draft in drafts(corral)))
    itself, words = drafts(corral)
    assert itself["acceptance"] > 0.9
    assert words["drafted"] > 32
    assert "itself.0: accepts" in corral.ok("status")
