"""LoRA adapters in the settings, and in an engine's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support import tiny_bert, tiny_gguf, tiny_lora
from support.samples import engine, machine

from supervisor.builds.discover import Engine
from supervisor.errors import ModelInvalid, SettingsInvalid
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.load import load
from supervisor.settings.schema import Settings
from supervisor.slot_store.policy import unsupported_reason
from supervisor.system.paths import Directories


class FixedPlanner(LaunchPlanner):
    def engine(self) -> Engine:
        return engine()


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("supervisor.fleet.planner.machine.read", machine)
    tiny_gguf.make(tmp_path / "chat.gguf")
    tiny_lora.make(tmp_path / "legal.gguf")
    tiny_lora.make(tmp_path / "poet.gguf", seed=2)
    tiny_bert.make(tmp_path / "vectors.gguf", "mean")
    return tmp_path


def planner(where: Path, model: str = "chat.gguf", **table: Any) -> FixedPlanner:
    settings = Settings(models={"m": {"path": where / model, **table}})
    return FixedPlanner(settings, Directories(*[where] * 5))


def values(shop: LaunchPlanner) -> dict[str, str | None]:
    return {line.flag: line.value for line in shop.plan("m").lines}


def test_adapters_are_loaded_with_scale_0_and_no_prompt_is_kept_without_its_slot(
    where: Path,
) -> None:
    table = {"legal": where / "legal.gguf", "poet": {"path": where / "poet.gguf", "scale": 0.5}}
    shop = planner(where, loras=table, flags={"cache-ram": 512})
    found = values(shop)
    assert found["--lora-scaled"] == f"{where}/legal.gguf:0,{where}/poet.gguf:0"
    assert "--lora-init-without-apply" in found
    assert found["--cache-ram"] == "0"
    assert shop.plan("m").has_chosen_adapters
    assert not planner(where).plan("m").has_chosen_adapters
    assert unsupported_reason(shop.plan("m")) is None
    both = sum((where / f"{name}.gguf").stat().st_size for name in table)
    assert shop.plan("m").memory_inputs.projector_bytes == both


def test_a_changed_adapter_changes_the_fingerprint(where: Path) -> None:
    shop = planner(where, loras={"legal": where / "legal.gguf"})
    before = shop.fingerprint(ReplicaId("m", 0), engine())
    tiny_lora.make(where / "legal.gguf", rank=2)
    assert shop.fingerprint(ReplicaId("m", 0), engine()) != before


@pytest.mark.parametrize(
    ("model", "adapter", "message"),
    [
        ("chat.gguf", "chat.gguf", "is no LoRA adapter but a model"),
        ("vectors.gguf", "legal.gguf", "is for llama, the model is bert"),
        ("chat.gguf", "gone.gguf", "not found"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused_before_the_engine_starts(
    where: Path, model: str, adapter: str, message: str
) -> None:
    with pytest.raises((SettingsInvalid, ModelInvalid), match=message):
        planner(where, model, loras={"legal": where / adapter}).plan("m")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loras": {"a": "a.gguf"}, "flags": {"lora": "b.gguf"}}, "lora both load adapters"),
        ({"loras": {"a": "a.gguf"}, "args": ("--lora-scaled", "b:1")}, "lora-scaled both"),
        ({"loras": {"a": "a,b.gguf"}}, "no adapter with , in its path"),
        ({"loras": {"a+b": "a.gguf"}}, "a variant's name"),
        ({"loras": {"a": {"path": "a.gguf", "scale": float("nan")}}}, "finite"),
    ],
)
def test_mistakes_in_the_table(where: Path, table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        planner(where, **table)


def test_paths_start_at_the_settings_file_and_names_are_taken(where: Path) -> None:
    file = where / "corral.toml"
    text = '[models.m]\npath = "chat.gguf"\n[models.m.loras]\nlegal = "legal.gguf"\n'
    file.write_text(text + 'poet = { path = "poet.gguf", scale = 0.5 }\n')
    loaded = load(file, config_dir=where)
    entry = FixedPlanner(loaded.settings, Directories(*[where] * 5)).entry("m")
    assert [(name, lora.path.parent, lora.scale) for name, lora in entry.loras.items()] == [
        ("legal", where, 1.0),
        ("poet", where, 0.5),
    ]
    file.write_text(text + '[models.n]\npath = "chat.gguf"\naliases = ["m+legal"]\n')
    with pytest.raises(SettingsInvalid, match=r"the name m\+legal belongs to the model m"):
        load(file, config_dir=where)
    file.write_text(text + 'poet = { path = "poet.gguf", size = 1 }\n')
    with pytest.raises(SettingsInvalid, match=r"models\.m\.loras\.poet\.size is unknown"):
        load(file, config_dir=where)
