"""A front with a node, and a node that is gone: `--all` of commands, and the view of machines."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, rest_of, until
from support.dashboard_page import Dashboard, chromium
from support.fork_server import ForkServer

MODEL = """
[models.{name}]
path = "{path}"
flags = {{ parallel = 2, threads = 1, ctx-size = 4096 }}
"""


@pytest.fixture
def machines(
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    tiny_model: Path,
    slow_model: Path,
) -> Iterator[tuple[CorralCli, CorralCli]]:
    """A front and its node; nobody listens on the port of the other node."""
    front, node = (CorralCli(tmp_path_factory.mktemp("m"), fork_server) for _ in range(2))
    with ExitStack() as ends, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        ends.callback(node.end)
        ends.callback(front.end)
        node.configure(MODEL.format(name="there", path=slow_model))
        node.ok("start")
        nodes = f"[nodes.b]\nurl = '{node.url}'\n"
        nodes += f"[nodes.gone]\nurl = 'http://127.0.0.1:{gone.getsockname()[1]}'\n"
        front.configure(MODEL.format(name="here", path=tiny_model) + nodes)
        front.ok("start")
        until(lambda: [found.state for found in front.status().nodes] == ["up", "down"])
        yield front, node


def all_of(corral: CorralCli, *words: str) -> Any:
    """Return the data of a command with --all, after a look at what it says is missing."""
    done = corral(*words, "--all", "--json")
    envelope = json.loads(done.stdout)
    assert (envelope["status"], envelope["exit_code"]) == ("ok", 0), done.stdout
    (missing,) = envelope["data"]["missing"]
    assert missing["node"] == "gone"
    assert missing["problem"]
    return envelope["data"]


def test_commands_and_the_page_gather_from_all_nodes(machines: tuple[CorralCli, CorralCli]) -> None:
    front, node = machines
    for model in ("here", "there"):
        with begin_stream(front, 4, model) as stream:
            rest_of(stream)
    here, there = all_of(front, "status")["machines"]
    assert [found["node"] for found in (here, there)] == ["(this machine)", "b"]
    assert [model["name"] for model in there["models"]] == ["there"]
    assert there["memory"]["host"]["total"] > 0
    shown = front("status", "--all")
    assert "there" in shown.stdout
    assert "node gone: takes no connection" in shown.stderr

    # The front also has the request to `there`, which it has forwarded.
    expected = [("(this machine)", "here"), ("(this machine)", "there"), ("b", "there")]
    until(lambda: ended_on(front) == expected)
    with begin_stream(node, 1000, "there"):
        (row,) = all_of(front, "requests")["requests"]
        assert (row["node"], row["model"]) == ("b", "there")
        assert "MACHINE" in front.ok("requests", "--all")

    used = all_of(front, "usage", "--by", "model")["usage"]
    assert {row["node"] for row in used} == {"(this machine)", "b"}
    assert "total" not in front.ok("usage", "--all")
    caches = all_of(front, "slots")["machines"]
    names = [[model["model"] for model in found["models"]] for found in caches]
    assert names == [["here"], ["there"]]

    expect.set_options(timeout=1000 * PATIENCE_S)
    with chromium() as browser, begin_stream(node, 1000, "there") as stream:
        dashboard = Dashboard(browser.new_context(), front.url)
        dashboard.sign_in(front.data("ui", "--no-browser")["url"])
        page = dashboard.page
        page.keyboard.press("0")
        expect(page.get_by_role("heading", name="Machines")).to_be_visible()
        expect(dashboard.row("Machines", "gone")).to_contain_text("takes no connection")
        expect(dashboard.row("Models of b", "there")).to_contain_text("loaded")
        expect(dashboard.row("Requests", "there").first).to_contain_text("decode")
        assert dashboard.violations() == []
        lost = dashboard.row("Machines", node.url)
        expect(lost).to_contain_text("up")
        stream.close()
        node.end()
        expect(lost).to_contain_text("takes no connection")
        assert dashboard.complaints == []


def ended_on(front: CorralCli) -> list[tuple[str, str]]:
    ended = all_of(front, "requests", "--last", "9")["requests"]
    return sorted((row["node"], row["model"]) for row in ended)
