"""Drafts on the real engine: shown, compared with none, and no batch is too small for them."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from support import tiny_eagle, tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli, until

from supervisor.daemon.control_messages import DraftStatus

# A model with a smaller one, and one that looks words up with a batch that holds none of them.
MODELS = """
[models.pair]
path = "{large}"
draft = "{model}"
[models.pair.flags]
parallel = 1
[models.words]
path = "{model}"
profile = "speculative"
[models.words.flags]
batch-size = 32
[models.words.slots]
queued_s = 0.5
quiet_s = 240
"""


def answer(url: str, model: str, tokens: int = 250) -> Any:
    body = {"model": model, "prompt": "a b c d", "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["timings"]


def drafts(corral: CorralCli) -> list[DraftStatus]:
    """The draft status of each model's first instance."""
    found = (model.instances[0].draft for model in corral.status().models)
    return [draft for draft in found if draft]


def test_draft_acceptance_is_shown(corral: CorralCli, tmp_path: Path) -> None:
    model = tiny_gguf.make(tmp_path / "cycle.gguf", mode="cycle")
    large = tiny_gguf.make(tmp_path / "large.gguf", mode="cycle", layers=8, ff=512)
    corral.configure(MODELS.format(model=large, large=large))
    refused = corral("plan", "pair")
    assert refused.returncode == 78
    assert "is too large to draft for" in refused.stderr
    corral.configure(MODELS.format(model=model, large=large))
    corral.env["CORRAL_SUPERVISOR__ADAPTIVE"] = "true"
    corral.ok("start")
    assert answer(corral.url, "words")["draft_n"] > 32
    answer(corral.url, "pair")
    until(lambda: all(draft.acceptance for draft in drafts(corral)))
    pair, words = drafts(corral)
    assert pair.acceptance
    assert pair.acceptance > 0.9
    assert words.drafted > 32
    assert "pair.0: accepts" in corral.ok("status")

    answer(corral.url, "words")  # with those before, enough for a trial without drafts
    trial = "words: spec-type = none now: a trial, against ngram-mod"
    until(lambda: trial in " ".join(corral.ok("status").split()))
    assert trial.removeprefix("words: spec-type = none now: ") in corral.ok("plan", "words")
    assert "draft_n" not in answer(corral.url, "words")
    adapted = [event for event in corral.events("model.adapted") if event["key"] == "spec-type"]
    assert [(event["before"], event["after"]) for event in adapted] == [("ngram-mod", "none")]


HEADS = """
[models.own]
path = "{own}"
profile = "speculative"
[models.plain]
path = "{own}"
preload = false
[models.eagle]
path = "{eagle}/model.gguf"
profile = "speculative"
[models.mtp]
path = "{mtp}/model.gguf"
profile = "speculative"
"""


def test_draft_heads_of_a_model_are_found_and_draft(corral: CorralCli, tmp_path: Path) -> None:
    for name in ("eagle", "mtp"):
        (tmp_path / name).mkdir()
    own = tiny_hybrid.make(tmp_path / "own.gguf", mode="cycle", drafts=True)
    tiny_gguf.make(tmp_path / "eagle" / "model.gguf", mode="cycle", layers=4)
    tiny_eagle.make(tmp_path / "eagle" / "head.gguf")
    tiny_hybrid.make(tmp_path / "mtp" / "model.gguf", mode="cycle")
    tiny_hybrid.make_drafts(tmp_path / "mtp" / "head.gguf")
    corral.configure(HEADS.format(own=own, eagle=tmp_path / "eagle", mtp=tmp_path / "mtp"))
    corral.ok("start")
    accepted = {}
    for name in ("own", "eagle", "mtp"):
        timings = answer(corral.url, name, 64)
        accepted[name] = timings["draft_n_accepted"] / timings["draft_n"]
    assert accepted["own"] > 0.9
    assert accepted["mtp"] > 0.9
    assert accepted["eagle"] > 0.1  # of each draft the first token is right
    assert "the model has layers that draft (MTP)" in corral.ok("plan", "own")
    assert "draft heads of this model beside it" in corral.ok("plan", "eagle")
    assert 'profile = "speculative" uses them' in corral("plan", "plain").stderr
    assert "speculative" not in corral("plan", "own").stderr
