"""The memory of a model is shown, and a model that cannot fit is rejected before a start."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_gguf
from support.corral_cli import CorralCli


def test_a_plan_shows_the_memory_of_an_instance(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    memory = corral.data("plan", "tiny")["memory"]
    parts = {
        key: value for key, value in memory["host"].items() if key not in ("total", "at_start")
    }
    assert sum(parts.values()) == memory["host"]["total"]
    assert memory["fits"]
    assert memory["would_fit"] == []
    text = corral.ok("plan", "tiny")
    assert "weights" in text
    assert "prompt cache" in text
    assert "main memory: " in text


def test_a_model_that_cannot_fit_is_rejected_with_suggestions(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(
        f'[models.tiny]\npath = "{tiny_model}"\n'
        f'[models.huge]\npath = "{tiny_model}"\nflags = {{ ctx-size = 2_000_000_000 }}\n'
    )
    corral.ok("start", "tiny")
    (running,) = corral.engines()
    failed = corral("start", "huge")
    assert failed.returncode == 78
    assert "huge can never fit: it needs" in failed.stderr
    assert "this would fit: " in failed.stderr
    assert corral.engines() == [running]
    planned = corral("plan", "huge")
    assert planned.returncode == 0
    assert "it can never fit" in planned.stderr
    assert corral.data("plan", "huge")["memory"]["would_fit"][-1]["ctx-size"] < 2_000_000_000


def test_a_memory_budget_limits_all_models_together(corral: CorralCli, tiny_model: Path) -> None:
    budget = '[supervisor]\nmemory_budget = "16 MiB"\n'
    corral.configure(f'{budget}[models.tiny]\npath = "{tiny_model}"\n')
    failed = corral("start")
    assert failed.returncode == 78
    assert "models may use 16.0 MiB" in failed.stderr


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model several times as large as the tiny one, alone in a directory."""
    (tmp_path / "models").mkdir()
    return tiny_gguf.make(tmp_path / "models" / "large.gguf", embd=256, heads=8, layers=4, ff=512)


def test_a_draft_with_another_vocabulary_is_rejected_before_a_start(
    corral: CorralCli, large: Path, tmp_path: Path
) -> None:
    other = tiny_gguf.make(tmp_path / "other.gguf", extra_tokens=200)
    corral.configure(f'[models.chat]\npath = "{large}"\ndraft = "{other}"\n')
    failed = corral("start")
    assert failed.returncode == 78
    assert "cannot draft for" in failed.stderr
    assert "604 tokens, the model 404" in failed.stderr


def test_a_draft_beside_the_model_is_found_and_used(corral: CorralCli, large: Path) -> None:
    corral.configure(f'[models.chat]\npath = "{large}"\ndraft = "auto"\n')
    (left_out,) = [
        line for line in corral.data("plan", "chat")["omitted"] if "draft" in line["flag"]
    ]
    assert "has no GGUF of its vocabulary" in left_out["reason"]
    draft = tiny_gguf.make(large.with_name("small.gguf"))
    plan = corral.data("plan", "chat")
    assert plan["memory"]["host"]["draft"] > draft.stat().st_size / 2
    corral.ok("start")
    (argv,) = corral.engine_argvs()
    assert argv[argv.index("--spec-draft-model") + 1] == str(draft)
    assert "slots" in corral.ok("plan", "chat")


def test_the_number_of_replicas_can_be_automatic(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\nreplicas = "auto"\n')
    found = corral.data("plan", "tiny")["replicas"]
    assert "physical cores" in found["reason"]
    corral.ok("start")
    assert len(corral.engines()) == found["count"]
