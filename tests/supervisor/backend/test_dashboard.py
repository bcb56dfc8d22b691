"""The dashboard's data from the daemon: logs by name, and settings of client programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import NotFound, UnknownModel
from supervisor.backend.dashboard import clients_of, find_log, log_files
from supervisor.clients.programs import ServedModel
from supervisor.system.paths import Directories

MODELS = [ServedModel("chat", 4096), ServedModel("large", 8192)]


def test_only_logs_of_known_instances_are_read(tmp_path: Path) -> None:
    (tmp_path / "chat.0.log").write_text("one\ntwo\n", "utf-8")
    (tmp_path / "other.0.log").write_text("of another daemon\n", "utf-8")
    directories, names = Directories(*[tmp_path] * 5), ["chat.0", "chat.1"]
    assert list(log_files(directories, names)) == ["chat.0"]
    assert find_log(directories, names, "chat.0") == tmp_path / "chat.0.log"
    for name in ("other.0", "chat.1", "../chat.0", "daemon", ""):
        with pytest.raises(NotFound, match=r"there are: chat\.0"):
            find_log(directories, names, name)


def test_client_settings_name_the_server_and_the_model(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8080"

    def settings(models: Sequence[ServedModel], wanted: str | None) -> dict[str, Any]:
        return clients_of(url, models, wanted, needs_key=True, cert=None, config=tmp_path)

    found = settings(MODELS, "large")
    assert (found["models"], found["model"]) == (["chat", "large"], "large")
    codex = next(client for client in found["clients"] if client["name"] == "codex")
    assert url in codex["files"][0]["content"]
    assert '"large"' in codex["files"][0]["content"]
    assert codex["command"] == "corral connect codex --write"
    assert any("CORRAL_API_KEY" in note for client in found["clients"] for note in client["notes"])
    assert settings([], None)["clients"] == []
    with pytest.raises(UnknownModel):
        settings(MODELS, "none")
