"""`[models.NAME.batching]` from the settings file to the engine and the router."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, until

SETTINGS = """
[models.chat]
path = "{path}"
[models.chat.batching]
max_sbatch_sequences = 3
max_context_length = 512
"""


def instances(corral: CorralCli) -> Any:
    with urllib.request.urlopen(f"{corral.url}/corral/v1/slots", timeout=60) as response:
        return json.load(response)["instances"]


def test_a_reload_turns_pure_decode_on(corral: CorralCli, tiny_model: Path) -> None:
    """seed 001: BatchConfig, SlotManager.num_slots, SequenceBatch.max_batch_size."""
    settings = SETTINGS.format(path=tiny_model)
    corral.configure(settings)
    corral.ok("start")
    (usual,) = instances(corral)
    assert (usual["num_slots"], usual["prefer_pure_decode"]) == (3, False)
    corral.configure(settings + "prefer_pure_decode = true\n")
    corral.ok("reload")
    until(lambda: [instance["prefer_pure_decode"] for instance in instances(corral)] == [True])
    (pure,) = instances(corral)
    assert (pure["num_slots"], pure["batch_type"]) == (3, "decode")
    with urllib.request.urlopen(f"{corral.url}/slots", timeout=60) as response:
        assert [slot["n_ctx"] for slot in json.load(response)] == [512] * 3
    lines = {line["flag"]: line for line in corral.data("plan", "chat")["lines"]}
    assert {lines[flag]["origin"] for flag in ("--parallel", "--ctx-size")} == {"batching"}


def test_the_status_shows_how_batch_requests_gathered(corral: CorralCli, tiny_model: Path) -> None:
    """seed 003: BatchQueueStats in the status."""
    corral.configure(SETTINGS.format(path=tiny_model))
    corral.ok("start")
    assert corral.status().batches == []
    request = urllib.request.Request(
        f"{corral.url}/v1/completions",
        b'{"model": "chat", "prompt": "a", "max_tokens": 1}',
        {"Content-Type": "application/json", "X-Corral-Priority": "batch"},
    )
    urllib.request.urlopen(request, timeout=60).close()
    (found,) = corral.status().batches
    assert (found.model, found.total_queued, found.total_single) == ("chat", 1, 1)
    assert found.avg_wait_ms > 0
    assert "BATCHES OF" in corral.ok("status")


def test_an_option_that_is_set_twice_is_refused(corral: CorralCli, tiny_model: Path) -> None:
    both = SETTINGS.format(path=tiny_model) + "[models.chat.flags]\nctx-size = 4096\n"
    corral.configure(both)
    failed = corral("config", "check")
    assert failed.returncode == 78
    assert "batching.max_context_length and flags.ctx-size set the same option" in failed.stderr
