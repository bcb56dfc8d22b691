"""Small GGUF files, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_clip
import tiny_gguf
import tiny_lora


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("files")
    return {
        "model": tiny_gguf.make(directory / "model.gguf"),
        "clip": tiny_clip.make(directory / "clip.gguf"),
        "wide_clip": tiny_clip.make(directory / "wide.gguf", embd=32),
        "lora": tiny_lora.make(directory / "lora.gguf"),
    }
