"""Tools and an MCP server of the real engine, used through the whole daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.corral_cli import CorralCli

MCP_SERVER = """
import json, sys
TOOL = {"name": "echo", "description": "says it", "inputSchema": {
    "type": "object", "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params", {})
    if "id" not in asked:
        continue
    result = {}
    if method == "initialize":
        result = {"protocolVersion": params.get("protocolVersion", "2024-11-05"),
            "capabilities": {"tools": {}}, "serverInfo": {"name": "e", "version": "1"}}
    if method == "tools/list":
        result = {"tools": [TOOL]}
    if method == "tools/call":
        result = {"content": [{"type": "text", "text": "said " + params["arguments"]["text"]}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
SETTINGS = """
[proxy]
listen = "{listen}"
{proxy}
[models.plain]
path = "{model}"
preload = false
[models.agent]
path = "{model}"
engine_tools = true
[models.agent.flags]
parallel = 1
ctx-size = 1024
threads = 1
tools = "read_file,exec_shell_command"
mcp-servers-config = "{mcp}"
"""
LOCAL = "127.0.0.1:0"


def configure(corral: CorralCli, model: Path, *, listen: str = LOCAL, proxy: str = "") -> None:
    script, mcp = corral.root / "mcp.py", corral.root / "mcp.json"
    script.write_text(MCP_SERVER, "utf-8")
    server = {"command": sys.executable, "args": [str(script)]}
    mcp.write_text(json.dumps({"mcpServers": {"here": server}}), "utf-8")
    corral.configure(SETTINGS.format(listen=listen, proxy=proxy, model=model, mcp=mcp))


def call(corral: CorralCli, tool: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    return httpx.post(
        f"{corral.url}/tools", json={"tool": tool, "params": params}, headers=headers, timeout=60
    )


def test_tools_and_an_mcp_server_answer_through_the_daemon(
    corral: CorralCli, tiny_model: Path
) -> None:
    configure(corral, tiny_model)
    corral.ok("start")
    found = httpx.get(f"{corral.url}/tools", timeout=60).json()
    assert {"read_file", "exec_shell_command", "here_echo"} == {tool["tool"] for tool in found}
    (corral.root / "note").write_text("what it says\n", "utf-8")
    assert "what it says" in call(corral, "read_file", path=str(corral.root / "note")).text
    assert "said hello" in call(corral, "here_echo", text="hello").text
    body = {"tool": "exec_shell_command", "params": {"command": "echo $((6*7))"}, "stream": True}
    with httpx.stream("POST", f"{corral.url}/tools", json=body, timeout=60) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert "42" in "".join(event.get("chunk", "") for event in events)
    assert events[-1]["done"] is True
    refused = (
        {"Origin": "https://evil.example"},
        {"Host": "192.0.2.1"},
        {"X-Forwarded-For": "192.0.2.1"},
    )
    for headers in refused:
        assert call(corral, "read_file", headers, path="/etc/hostname").status_code == 403
    plain = httpx.get(f"{corral.url}/tools?model=plain", timeout=60)
    assert plain.status_code == 403
    assert "agent: engine_tools is on" in corral.ok("status")
    assert "engine_tools is on" in corral.ok("doctor")
    assert "DANGER" not in corral.ok("status") + corral.ok("doctor")


def test_with_keys_beyond_loopback_a_key_needs_the_right(
    corral: CorralCli, tiny_model: Path
) -> None:
    keys = corral.root / "config" / "keys.toml"
    configure(corral, tiny_model, listen="0.0.0.0:0", proxy=f'api_keys_file = "{keys}"')
    agent = corral.data("key", "add", "agent", "--tools")["key"]
    admin = corral.data("key", "add", "admin", "--admin")["key"]
    corral.ok("start")
    for key, status in ((agent, 200), (admin, 403), ("corral-wrong-key", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert call(corral, "here_echo", headers, text="hello").status_code == status
    assert call(corral, "here_echo", text="hello").status_code == 401
    assert "DANGER: agent: engine_tools is on" in corral.ok("status")
    assert "DANGER: other machines reach 0.0.0.0" in corral.ok("doctor")


def test_without_a_key_other_machines_use_no_tools(corral: CorralCli, tiny_model: Path) -> None:
    configure(corral, tiny_model, listen="0.0.0.0:0")
    corral.ok("start")
    port = corral.url.rpartition(":")[2]
    outside = {"Host": f"192.0.2.1:{port}"}
    assert call(corral, "here_echo", outside, text="hello").status_code == 403
    assert call(corral, "here_echo", text="hello").status_code == 200


@pytest.mark.parametrize("flag", ['tools = "all"', 'mcp-servers-json = "{}"', "agent = true"])
def test_without_the_setting_the_flags_are_refused(
    corral: CorralCli, tiny_model: Path, flag: str
) -> None:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\nflags = {{ {flag} }}\n')
    assert "engine_tools = true" in corral("plan", "tiny").stderr
