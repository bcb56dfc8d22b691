"""The first corral.toml is valid, whatever the models are."""

from __future__ import annotations

import tomllib
from pathlib import Path

from supervisor.settings.edit import InitialModel, initial_text
from supervisor.settings.load import merge

GOOD = InitialModel("qwen3:8b", {"path": "/m/q.gguf", "flags": {"mmproj": "/m/p.gguf"}}, "facts")
VECTORS = InitialModel("bge", {"path": "/m/b.gguf"}, "facts", generates=False)
LARGE = InitialModel("large", {"path": "/m/l.gguf"}, "facts", "it needs 90 GiB of main memory")


def test_models_that_fit_are_served_and_others_stand_in_comments() -> None:
    text = initial_text("2 cores", [LARGE, VECTORS, GOOD])
    found = tomllib.loads(text)
    assert found["proxy"]["default_model"] == "qwen3:8b"
    assert found["models"] == {
        "bge": {"path": "/m/b.gguf", "preload": False},
        "qwen3:8b": {"path": "/m/q.gguf", "flags": {"mmproj": "/m/p.gguf"}},
    }
    assert "# Not served: it needs 90 GiB of main memory\n# [models.large]\n" in text
    assert merge(found, Path("corral.toml")).settings.models["bge"].preload is False


def test_without_a_model_there_is_an_example() -> None:
    text = initial_text("2 cores", [])
    assert tomllib.loads(text) == {"proxy": {"listen": "127.0.0.1:8080"}}
    assert "# [models.chat]" in text


def test_the_commented_choices_are_settings() -> None:
    lines = initial_text("2 cores", [GOOD]).splitlines()
    choices = [
        line.removeprefix("# ").partition("#")[0] for line in lines if line.startswith("# p")
    ]
    merge({"models": {"a": {"path": "a.gguf", **tomllib.loads("\n".join(choices))}}}, None)
