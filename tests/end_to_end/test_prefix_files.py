"""A prefix that conversations share is saved once, and read where it is not."""

from __future__ import annotations

import json
import urllib.request
from itertools import count, islice
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, until

LONG = "B is kind and looks at the moon, at the river and at the stone" * 24
SETTINGS = """
[models.chat]
path = "{model}"
replicas = {replicas}
[models.chat.flags]
parallel = 2
ctx-size = 8192
threads = 1
"""


def begin(corral: CorralCli, asked: str) -> Any:
    """Begin a conversation; return the engine's timings."""
    system, user = {"role": "system", "content": LONG}, {"role": "user", "content": asked}
    body = {"model": "chat", "messages": [system, user], "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["timings"]


def tiers(corral: CorralCli) -> dict[str, str]:
    """Return where the first prompt of each instance was found."""
    found: dict[str, str] = {}
    for event in corral.events("request.finished"):
        found.setdefault(event["instance"], event["cache_tier"])
    return found


def test_a_shared_prefix_is_computed_on_one_replica_and_restored_on_others(
    corral: CorralCli, slow_model: Path
) -> None:
    # Its prompts take so long that a file is worth reading, however slow the disk is.
    corral.configure(SETTINGS.format(model=slow_model, replicas=2))
    corral.ok("start")
    questions = (f"question {at}" for at in count())
    for asked in islice(questions, 3):
        begin(corral, asked)
    until(lambda: corral.events("prefix.saved"))
    (saved,) = corral.events("prefix.saved")
    assert saved["cached"] > 0.9 * saved["tokens"]
    until(lambda: saved["tokens"] in [slot["tokens"] for slot in corral.data("slots", "list")])
    until(lambda: begin(corral, next(questions)) and len(tiers(corral)) == 2)
    assert "disk" in tiers(corral).values()
    corral.configure(SETTINGS.format(model=slow_model, replicas=3))
    assert corral.data("reload")["added"] == ["chat.2"]
    (filled,) = corral.events("slots.restored")
    assert (filled["instance"], filled["tokens"]) == ("chat.2", saved["tokens"])
