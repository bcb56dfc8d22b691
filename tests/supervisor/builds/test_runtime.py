"""An engine described as a runtime."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.corral_cli import CorralCli
from support.samples import GPU, engine

from supervisor.builds.discover import runtime_metadata


def test_an_engine_has_the_metadata_of_a_runtime() -> None:
    """Seed 002: RuntimeMetadata."""
    assert runtime_metadata(replace(engine(), version="6123 (abc1234)")) == {
        "format": "gguf",
        "runtime_name": "llama.cpp (llama-server)",
        "version": "6123 (abc1234)",
        "supports_gpu": False,
        "supports_streaming": True,
    }


@pytest.mark.parametrize("has_gpu", [True, False])
def test_gpus_are_supported_where_the_engine_lists_one(has_gpu: bool) -> None:  # noqa: FBT001
    """Seed 002: supports_gpu, which is true for every engine there."""
    found = engine("b10434", *([GPU] if has_gpu else []))
    assert runtime_metadata(found)["supports_gpu"] == has_gpu


def test_an_engine_that_does_not_run_supports_nothing() -> None:
    names = ("version", "supports_gpu", "supports_streaming")
    assert [runtime_metadata(None)[name] for name in names] == [None, False, False]


def test_the_list_of_engines_has_it(corral: CorralCli) -> None:
    """Seed 002: `corral engine list --json`."""
    (found, *_) = json.loads(corral("engine", "list", "--json").stdout)["data"]
    assert (found["format"], found["runtime_name"]) == ("gguf", "llama.cpp (llama-server)")
    assert found["supports_streaming"] is True
    assert found["supports_gpu"] is bool(found["devices"])
    assert found["version"]
