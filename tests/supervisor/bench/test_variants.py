"""Which command lines a bench compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_bert

from supervisor.bench.variants import PLAIN, choose, of_profile, plain_variant
from supervisor.errors import SettingsInvalid
from supervisor.plan.plan import Plan
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories


@pytest.fixture
def where(runtime: Path) -> Directories:
    return Directories(*[runtime] * 5)


@pytest.fixture
def settings(tiny_model: Path) -> Settings:
    return Settings(
        models={
            "tiny": {"path": tiny_model, "profile": "low-latency", "replicas": 3},
            "other": {"path": tiny_model},
        }
    )


def flags(plan: Plan) -> dict[str, str | None]:
    return {line.flag: line.value for line in plan.lines}


def test_the_engines_defaults_are_compared_with_the_models_profile(
    settings: Settings, where: Directories
) -> None:
    base, own = choose(settings, where, "tiny", [])
    assert (base.name, base.profile) == (PLAIN, None)
    assert (own.name, own.profile) == ("low-latency", "low-latency")
    assert set(flags(base.plan)) == {"--model", "--alias"}
    assert base.argv == (
        str(base.plan.engine.path),
        *("--model", str(base.plan.gguf.path), "--alias", "tiny"),
    )
    assert "--parallel" in own.argv


def test_a_variant_has_the_machine_for_itself(settings: Settings, where: Directories) -> None:
    alone = Settings(models={"tiny": {**settings.models["tiny"].model_dump(), "replicas": 1}})
    expected = of_profile(alone, where, "tiny").argv
    assert of_profile(settings, where, "tiny").argv == expected


def test_the_flags_of_a_variant_win(settings: Settings, where: Directories) -> None:
    made = of_profile(settings, where, "tiny", "base", {"parallel": 3, "ctx-size": 768})
    assert flags(made.plan)["--parallel"] == "3"


def test_a_profile_may_be_compared_with_itself(settings: Settings, where: Directories) -> None:
    found = choose(settings, where, "tiny", ["base", "plain", "base"])
    assert [entry.name for entry in found] == ["base", "plain", "base (2)"]
    assert found[0].argv == found[2].argv


def test_a_wrong_profile_is_named(settings: Settings, where: Directories) -> None:
    with pytest.raises(SettingsInvalid, match="did you mean low-latency"):
        choose(settings, where, "tiny", ["low-latencyy"])


def test_a_named_profile_is_measured_without_tuned_flags(
    settings: Settings, where: Directories
) -> None:
    where.tuned_profiles.mkdir()
    (where.tuned_profiles / "tiny.toml").write_text('extends = "low-latency"\n[flags]\npoll = 7\n')
    own, named = of_profile(settings, where, "tiny"), choose(settings, where, "tiny", ["base"])[0]
    assert flags(own.plan).get("--poll") == "7"
    assert "--poll" not in flags(named.plan) or flags(named.plan)["--poll"] != "7"


def test_the_defaults_of_an_embedding_model_still_embed(where: Directories, tmp_path: Path) -> None:
    made = tiny_bert.make(tmp_path / "b.gguf", "mean")
    own = of_profile(Settings(models={"bert": {"path": made}}), where, "bert")
    found = plain_variant(own.plan)
    assert {"--embedding", "--embeddings"} & set(flags(found.plan))
    assert len(found.plan.lines) < len(own.plan.lines)
    assert found.plan.embedding
    assert found.plan.estimate.host.at_start > 0
