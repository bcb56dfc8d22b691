"""What files tell clients is read once for each version."""

from __future__ import annotations

from pathlib import Path

from samples import model

from supervisor.errors import ModelInvalid
from supervisor.flags.plan import ModelEntry
from supervisor.gguf.metadata import Gguf
from supervisor.proxy_adapter.model_metas import ModelMetas


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    entry = ModelEntry("chat", tmp_path / "chat.gguf")
    reads: list[str] = []

    def read(name: str) -> Gguf:
        reads.append(name)
        if not entry.path.exists():
            raise ModelInvalid("it is missing")
        return model()

    metas = ModelMetas(read)
    assert metas.of(entry) == metas.of(entry) == {}
    assert reads == ["chat"]
    entry.path.write_text("a")
    assert metas.of(entry)["n_ctx_train"] == model().ctx_train
    entry.path.write_text("ab")
    assert metas.of(entry) is metas.of(entry)
    assert reads == ["chat"] * 3
