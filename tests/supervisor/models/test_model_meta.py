"""The facts about a file in the list of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support import engine as engines
from support.samples import model

from supervisor.builds.discover import Engine
from supervisor.models import metadata
from supervisor.models.model_meta import model_meta


def test_the_metadata_equal_those_of_the_engine(
    engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    with engines.running(engine, tiny_model, "-c", "512", "-np", "2") as socket:
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            key = {"Authorization": f"Bearer {engines.KEY}"}
            (listed,) = client.get("/v1/models", headers=key).json()["data"]
    meta = listed["meta"]
    del meta["n_ctx"]  # of a slot, while it runs
    assert model_meta(metadata.read(tiny_model, cache_dir=tmp_path)) == meta


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("F16", "F16"),
        ("F32", "all F32"),
        ("Q4_0", "Q4_0"),
        ("Q4_K_M", "Q4_K - Medium"),
        ("Q3_K_L", "Q3_K - Large"),
        ("Q2_K", "Q2_K - Medium"),
        ("Q6_K", "Q6_K"),
        ("IQ3_M", "IQ3_S mix - 3.66 bpw"),
    ],
)
def test_file_types_have_the_engines_names(ours: str, theirs: str) -> None:
    assert model_meta(replace(model(), quantisation=ours))["ftype"] == theirs


def test_an_unknown_tokenizer_has_no_number() -> None:
    assert "vocab_type" not in model_meta(replace(model(), tokenizer="of-tomorrow"))
