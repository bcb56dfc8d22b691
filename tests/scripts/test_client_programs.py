"""The script of the model for coding agents, and their prompts."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.client_programs.clients import CLIENTS, own_files
from scripts.client_programs.packages import environment
from scripts.client_programs.run import BIG, COMMANDS
from scripts.client_programs.scripted_model import TOOLS, script
from supervisor.clients.programs import CLIENTS as CONNECTED


def test_a_line_of_a_script_is_one_token() -> None:
    for commands in (COMMANDS, BIG):
        lines = script(commands)
        assert len({line.text for line in lines}) == len(lines) == len(TOOLS) * len(commands) + 1


def test_a_call_has_the_arguments_of_its_tool() -> None:
    calls = {tool.name: json.loads(tool.call("ls")) for tool in TOOLS}
    assert calls["exec_command"]["arguments"] == {"cmd": "ls"}
    assert calls["shell"]["arguments"] == {"command": ["bash", "-lc", "ls"]}


def test_clients_are_those_of_corral_connect(tmp_path: Path) -> None:
    known = {client.name for client in CONNECTED}
    for client in CLIENTS:
        assert client.name in known
        assert "hello" in client.first("chat", "hello")
        assert "hello" in client.again("chat", "hello")
        assert all(path.is_relative_to(tmp_path) for path in own_files(client, tmp_path))


def test_nothing_is_reached_beyond_this_machine(tmp_path: Path) -> None:
    found = environment(tmp_path, tmp_path, {})
    assert found["HTTPS_PROXY"] == "http://127.0.0.1:9"
    assert found["NO_PROXY"] == "127.0.0.1,localhost"
