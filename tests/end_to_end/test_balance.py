"""Layers that move between two workers of the real engine, one of which answers late."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import tiny_gguf
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.slow_worker import slow_worker, worker

from supervisor.builds.discover import Engine

LAYERS = 6
LATE_S = 0.02
TOKENS = 12
SETTINGS = """
[models.chat]
path = "{path}"
workers = ["a", "b"]
flags = {{ threads = 1, parallel = 1, ctx-size = 1024{flags} }}
[workers.a]
address = "127.0.0.1:{a}"
[workers.b]
address = "127.0.0.1:{b}"
[balance]
min_samples = 10
{balance}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.make(tmp_path_factory.mktemp("models") / "split.gguf", layers=LAYERS)


@contextmanager
def split(
    corral: CorralCli, engine: Engine, model: Path, balance: str = "", flags: str = ""
) -> Iterator[None]:
    with worker(engine) as (_, a), slow_worker(engine, LATE_S) as b:
        corral.configure(SETTINGS.format(path=model, a=a, b=b, balance=balance, flags=flags))
        corral.ok("start")
        yield
        corral.ok("stop")


def say(corral: CorralCli) -> str:
    body = {"model": "chat", "prompt": "the user", "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{corral.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
        return str(json.load(found)["choices"][0]["text"])


def layers(corral: CorralCli) -> list[int]:
    return [shard.layer_count for balance in corral.client.balances() for shard in balance.shards]


def figures_of(metrics: str) -> dict[str, float]:
    """Return the metrics of worker b, by name."""
    labels = 'model="chat",model_instance="chat.0",worker="b"'
    found = re.findall(rf"^corral_shard_(\w+){{{labels}}} (\S+)", metrics, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_layers_move_to_the_faster_worker(corral: CorralCli, engine: Engine, model: Path) -> None:
    """seed 000: metrics, advice, and what --apply does with it"""
    with split(corral, engine, model):
        said = say(corral)
        (found,) = corral.data("balance", "chat")
        assert found["decision"] == "rebalance", found
        a, b = found["shards"]
        assert (a["shard_name"], b["shard_name"]) == ("a", "b")
        assert a["layer_count"] + b["layer_count"] == LAYERS
        assert b["min_latency_us"] >= LATE_S * 1_000_000 > a["avg_latency_us"]
        assert [a["suggested_layers"], b["suggested_layers"]] == [5, 1]
        with urllib.request.urlopen(f"{corral.url}/metrics", timeout=PATIENCE_S) as metrics:
            figures = figures_of(metrics.read().decode())
        assert figures["forwards_total"] == b["total_forwards"]
        assert figures["compute_min_seconds"] == b["min_latency_us"] / 1_000_000
        assert figures["compute_max_seconds"] == b["max_latency_us"] / 1_000_000
        assert figures["compute_last_seconds"] == b["last_latency_us"] / 1_000_000
        moved = corral.data("balance", "chat", "--apply")
        assert moved["after"] == {"a": 5, "b": 1}
        assert layers(corral) == [5, 1]
        assert say(corral) == said
        again = corral("balance", "chat", "--apply")
        assert "nothing was changed" in again.stdout + again.stderr
        undone = corral.data("balance", "chat", "--undo")
        assert (undone["after"], undone["estimated_speedup"]) == (moved["before"], None)
        assert layers(corral) == [a["layer_count"], b["layer_count"]]
        assert "→ 5, b" in corral.ok("balance", "chat", "--undo")
        corral.ok("stop")
        corral.ok("start")
        assert layers(corral) == [5, 1]


def test_layers_move_by_themselves_if_enabled(
    corral: CorralCli, engine: Engine, model: Path
) -> None:
    """seed 000: automatic only when enabled"""
    with split(corral, engine, model, "automatic = true\neval_interval_secs = 0"):
        say(corral)
        until(lambda: corral.events("model.adapted"))
        assert layers(corral) == [5, 1]
        (event,) = corral.events("model.adapted")
        assert event["key"] == "tensor-split"


def test_a_split_that_is_set_stays(corral: CorralCli, engine: Engine, model: Path) -> None:
    """seed 000: --apply changes no setting of the user's"""
    with split(corral, engine, model, flags=', tensor-split = "3,4"'):
        say(corral)
        assert layers(corral) == [3, 3]
        done = corral("balance", "chat", "--apply")
        assert done.returncode != 0
        assert "tensor-split" in done.stderr
        undone = corral("balance", "chat", "--undo")
        assert (undone.returncode, "no layers of chat were moved" in undone.stderr) == (78, True)
        assert layers(corral) == [3, 3]


def test_without_workers_there_is_nothing_to_balance(corral: CorralCli, tiny_model: Path) -> None:
    """seed 000: corral balance"""
    assert corral("balance").returncode == 3  # no daemon
    corral.configure(f'[models.chat]\npath = "{tiny_model}"\n')
    corral.ok("start")
    assert "no loaded model" in corral.ok("balance")
    done = corral("balance", "chat", "--apply")
    assert done.returncode != 0
    assert "has no workers" in done.stderr
    assert corral("balance", "--apply").returncode != 0
    corral.ok("stop")
