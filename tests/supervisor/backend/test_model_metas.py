"""The files of models are read once for each version of the settings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from support.samples import model

from supervisor.backend.models import ModelMetas
from supervisor.errors import ModelInvalid
from supervisor.models.metadata import Gguf


class Planner:
    def __init__(self, found: Gguf | None) -> None:
        self.found = found
        self.reads: list[str] = []

    def gguf(self, name: str) -> Gguf:
        self.reads.append(name)
        if self.found is None:
            raise ModelInvalid("it is missing")
        return self.found

    def projector(self, _: str) -> None:
        return None


def test_a_file_is_read_again_with_new_settings() -> None:
    chat = cast("Any", SimpleNamespace(plan=None, entry=SimpleNamespace(name="chat")))
    missing, there = cast("Any", Planner(None)), cast("Any", Planner(model()))
    metas = ModelMetas()
    assert metas.read(chat, missing) == metas.read(chat, missing) == ({}, False)
    assert metas.read(chat, there) is metas.read(chat, there)
    assert metas.read(chat, there)[0]["n_ctx_train"] == model().ctx_train
    assert missing.reads == there.reads == ["chat"]


def test_a_planned_model_has_the_values_of_its_plan() -> None:
    plan = SimpleNamespace(
        gguf=replace(model(), ctx_train=77), memory_inputs=SimpleNamespace(chosen={})
    )
    chat = cast("Any", SimpleNamespace(plan=plan, entry=SimpleNamespace(name="chat")))
    planner = cast("Any", Planner(model()))
    assert ModelMetas().read(chat, planner)[0]["n_ctx_train"] == 77
    assert planner.reads == []
