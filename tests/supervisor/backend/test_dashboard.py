"""What the dashboard gets of the daemon: logs by name, and settings of client programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.errors import NotFound, UnknownModel
from supervisor.backend.dashboard import DashboardLogs, clients_of, facts_of
from supervisor.clients.client import ServedModel
from supervisor.system.paths import Directories

MODELS = [ServedModel("chat", 4096), ServedModel("large", 8192)]


@pytest.fixture
def logs(tmp_path: Path) -> DashboardLogs:
    (tmp_path / "chat.0.log").write_text("one\ntwo\n", "utf-8")
    (tmp_path / "other.0.log").write_text("of another daemon\n", "utf-8")
    return DashboardLogs(Directories(tmp_path, tmp_path, tmp_path, tmp_path, tmp_path))


async def test_only_logs_of_known_instances_are_read(logs: DashboardLogs) -> None:
    names = ["chat.0", "chat.1"]
    assert list(logs.sources(names)) == ["chat.0"]
    assert await logs.last_lines("chat.0", 1, names) == ("two",)
    for name in ("other.0", "chat.1", "../chat.0", "daemon", ""):
        with pytest.raises(NotFound, match=r"there are: chat\.0"):
            await logs.last_lines(name, 1, names)
        with pytest.raises(NotFound):
            logs.lines(name, 1, names)


def test_client_settings_name_the_server_and_the_model(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8080"
    facts = facts_of(url, MODELS, "large", needs_key=True, cert=None)
    assert facts
    found = clients_of(facts, tmp_path)
    assert (found.models, found.model) == (("chat", "large"), "large")
    codex = next(client for client in found.clients if client.name == "codex")
    assert url in codex.files[0].content
    assert '"large"' in codex.files[0].content
    assert codex.command == "corral connect codex --write"
    assert any("CORRAL_API_KEY" in note for client in found.clients for note in client.notes)
    assert facts_of(url, [], None, needs_key=False, cert=None) is None
    with pytest.raises(UnknownModel):
        facts_of(url, MODELS, "none", needs_key=False, cert=None)
