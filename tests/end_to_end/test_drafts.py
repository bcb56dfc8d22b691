"""Drafts on the real engine: what they bring is measured, and no batch is too small for them."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import tiny_gguf
from end_to_end.home import Corral, until

# A model that drafts for itself, and one that looks words up with a batch that holds none of them.
MODELS = """
[supervisor]
liveness_interval_s = 1
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


def drafts(corral: Corral) -> list[Any]:
    """Return what the drafts of each model's first instance bring."""
    return [model["instances"][0]["draft"] for model in corral.data("status")["models"]]


def test_what_a_draft_brings_is_measured_and_told(corral: Corral, tmp_path: Path) -> None:
    model = tiny_gguf.make(tmp_path / "cycle.gguf", mode="cycle")
    corral.configure(MODELS.format(model=model))
    corral.ok("start")
    url = corral.url
    assert answer(url, "words")["draft_n"] > 32
    answer(url, "itself")
    until(lambda: all(draft["with_tps"] for draft in drafts(corral)))
    itself, words = drafts(corral)
    assert itself["estimate"]
    assert itself["acceptance"] > 0.9
    assert words["drafted"] > 32
    log = (corral.home / "log" / "daemon.log").read_text("utf-8")
    told = [
        one for one in map(json.loads, log.splitlines()) if one["event"] == "speculation.measured"
    ]
    (about_itself,) = (one for one in told if one["model"] == "itself")
    assert about_itself["without_tps"] == round(itself["without_tps"], 1)
    assert about_itself["slower"] is bool(itself["cure"])
