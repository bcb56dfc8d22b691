"""A llama-corral of its own for each test, and the models they serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_gguf
from end_to_end.home import Corral


@pytest.fixture
def corral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corral]:
    # Short, because unix socket paths are.
    corral = Corral(tmp_path_factory.mktemp("c"))
    yield corral
    corral.end()


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that writes for a minute when it may, so that streams overlap."""
    path = tmp_path_factory.mktemp("models") / "slow.gguf"
    return tiny_gguf.make(
        path, embd=256, heads=8, kv_heads=2, layers=12, ff=1024, ctx=32_768, mode="cycle"
    )
