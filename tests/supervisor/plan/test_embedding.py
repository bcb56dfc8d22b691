"""Embedding models are recognised, and compute one text at a time in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import tiny_bert
from support.samples import GIB, engine, machine, model

from supervisor.builds.help import FlagValue
from supervisor.models import metadata
from supervisor.models.metadata import Gguf
from supervisor.plan.draft import Draft
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.system.paths import shipped_directory

MEAN: Mapping[str, FlagValue] = {"embeddings": True, "pooling": "mean"}
BERT = model(architecture="bert", is_causal=False, pooling="cls", ctx_train=512)


def planned(
    flags: Mapping[str, FlagValue] | None = None,
    *,
    of: Gguf | None = None,
    profile: str = "base",
    memory_bytes: int = 32 * GIB,
    args: tuple[str, ...] = (),
) -> Plan:
    entry = ModelEntry("m", Path("/m.gguf"), profile=profile, flags=flags or {}, args=args)
    return make_plan(
        entry,
        load(profile, [shipped_directory("profiles")]),
        engine(),
        of or model(),
        machine(memory_bytes=memory_bytes),
        instances=1,
        draft=Draft(),
    )


def chosen(plan: Plan, *keys: str) -> tuple[Any, ...]:
    return tuple(plan.memory_inputs.chosen.get(key) for key in keys)


@pytest.mark.parametrize(
    ("flags", "of", "args"),
    [
        (MEAN, {}, ()),
        ({"reranking": True}, {}, ()),
        ({"pooling": "mean"}, {}, ()),
        ({}, {}, ("--embeddings", "--pooling", "cls")),
        ({}, {"architecture": "bert", "is_causal": False}, ()),
        ({}, {"pooling": "rank"}, ()),
    ],
)
@pytest.mark.parametrize("profile", ["base", "high-throughput", "low-memory", "speculative"])
def test_one_text_at_a_time_in_one_piece(
    flags: Mapping[str, FlagValue], of: Mapping[str, Any], args: tuple[str, ...], profile: str
) -> None:
    plan = planned(flags, of=model(ctx_train=2048, **of), args=args, profile=profile)
    assert plan.embedding
    assert plan.slots == 1
    sizes = chosen(plan, "ctx-size", "batch-size", "ubatch-size")
    assert sizes == (2048, 2048, 2048)
    assert not any(key.startswith("spec-") for key in plan.memory_inputs.chosen)


def test_the_purpose_in_the_file_sets_the_flag() -> None:
    assert chosen(planned(of=BERT), "embedding", "rerank") == (True, None)
    assert chosen(planned(of=model(pooling="rank")), "embedding", "rerank") == (None, True)
    assert planned({"embedding": False}, of=BERT).embedding is None
    assert planned().embedding is None


def test_the_last_token_alone_needs_no_long_batch_and_no_prompt_cache() -> None:
    plan = planned({"embeddings": True, "pooling": "last"})
    assert chosen(plan, "ubatch-size", "cache-prompt") == (512, False)


def test_several_slots_of_a_model_share_one_cache() -> None:
    plan = planned({**MEAN, "parallel": 4, "kv-unified": False})
    assert chosen(plan, "parallel", "kv-unified") == (4, True)
    assert plan.memory_inputs.chosen["ubatch-size"] == plan.ctx_size
    reason = next(line.reason for line in plan.lines if line.flag == "--kv-unified")
    assert "4 slots" in reason


def test_a_batch_that_the_model_sets_stays() -> None:
    assert chosen(planned({**MEAN, "ubatch-size": 256}), "ubatch-size") == (256,)


def test_the_context_is_limited_by_the_memory_for_one_micro_batch() -> None:
    small = planned(MEAN, memory_bytes=2 * GIB)
    assert small.ctx_size < planned(MEAN).ctx_size == 8192
    assert small.estimate.host.compute < GIB


def test_every_input_token_has_a_row_of_logits() -> None:
    """SmolLM2-135M, 2048 tokens, pooling mean: 401 MiB by the log of build 10434."""
    plan = planned({**MEAN, "ctx-size": 2048})
    assert plan.estimate.host.compute / 2**20 == pytest.approx(401, rel=0.01)


def test_a_model_that_generates_no_text_has_no_kv_cache() -> None:
    plan = planned(of=BERT)
    assert (plan.estimate.host.kv, plan.memory_inputs.chosen["cache-ram"]) == (0, 0)
    assert not plan.has_own_slots


@pytest.mark.parametrize("pooling", ["mean", "cls", "rank"])
def test_embedding_models_are_recognised(tmp_path: Path, pooling: Any) -> None:
    found = metadata.read(tiny_bert.make(tmp_path / "m.gguf", pooling), cache_dir=tmp_path)
    assert (found.is_causal, found.pooling) == (False, pooling)
