"""The script of the model that coding agents are tried with, and their settings."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from scripts.client_programs.clients import CLIENTS
from scripts.client_programs.npm import environment
from scripts.client_programs.run import BIG, COMMANDS
from scripts.client_programs.scripted_model import TOOLS, script


def test_a_line_of_a_script_is_one_token_of_its_own() -> None:
    for commands in (COMMANDS, BIG):
        lines = script(commands)
        assert len({line.text for line in lines}) == len(lines) == len(TOOLS) * len(commands) + 1


def test_a_call_has_the_arguments_of_its_tool() -> None:
    calls = {tool.name: json.loads(tool.call("ls")) for tool in TOOLS}
    assert calls["exec_command"]["arguments"] == {"cmd": "ls"}
    assert calls["shell"]["arguments"] == {"command": ["bash", "-lc", "ls"]}


def test_clients_are_configured_for_this_machine_alone(tmp_path: Path) -> None:
    for client in CLIENTS:
        client.configure(tmp_path, "http://127.0.0.1:1", ["wide"])
    codex = tomllib.loads((tmp_path / ".codex" / "config.toml").read_text())
    assert codex["model_providers"]["corral"]["base_url"] == "http://127.0.0.1:1/v1"
    opencode = json.loads((tmp_path / ".config" / "opencode" / "opencode.json").read_text())
    assert opencode["provider"]["corral"]["options"]["baseURL"] == "http://127.0.0.1:1/v1"
    found = environment(tmp_path, tmp_path, {})
    assert found["HTTPS_PROXY"] == "http://127.0.0.1:9"
    assert found["NO_PROXY"] == "127.0.0.1,localhost"
