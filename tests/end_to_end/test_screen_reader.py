"""The roles and names that a screen reader finds in each view, by Chromium's accessibility tree.

They are compared with files of `screen_reader/`, without texts, and with N for each number.
`UPDATE_SCREENS=1 pytest` writes these files; look at the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.dashboard_page import VIEWS, Dashboard

TREES = Path(__file__).parent / "screen_reader"
SETTINGS = """
[models.tiny]
path = "{tiny}"
flags = {{ ctx-size = 512, parallel = 2, threads = 1 }}
[nodes.attic]
url = "{node}"
"""
# Their names are texts, which differ between machines and moments.
WITHOUT_NAME = {"row", "rowheader", "cell", "code", "caption"}
# Left out for their content, like roles with a capital, which are not ARIA's but Chromium's own.
LEFT_OUT = {"generic", "none", "sectionheader"}
NUMBER = re.compile(r"\d[\d.,:]*(?: (?:[KMGT]i)?B\b| ms\b| s\b| min\b| h\b| d\b| %)*(?: N)*")


@pytest.fixture
def dashboard(browser: Browser, corral: CorralCli, tiny_model: Path, node_url: str) -> Dashboard:
    corral.hide_stored_models()
    corral.env["GGML_VK_VISIBLE_DEVICES"] = ""  # a device has a bar and a heading
    corral.configure(SETTINGS.format(tiny=tiny_model, node=node_url))
    corral.ok("start")
    until(lambda: corral.data("usage"))  # of the engine's start
    dashboard = Dashboard(browser.new_context(), corral.url)
    dashboard.sign_in(corral.data("ui", "--no-browser")["url"])
    return dashboard


def test_each_view_has_the_roles_and_names_of_its_file(dashboard: Dashboard) -> None:
    for view in VIEWS:
        dashboard.show(view)
        if view == "logs":
            dashboard.row("Log of the daemon", "daemon.started").wait_for()
        expect(dashboard.page.locator(".waiting")).to_have_count(0, timeout=1000 * PATIENCE_S)
        text = "\n".join(tree(dashboard)) + "\n"
        file = TREES / f"{view}.txt"
        if os.environ.get("UPDATE_SCREENS"):
            file.write_text(text, "utf-8")
        assert text == file.read_text("utf-8"), view


def tree(dashboard: Dashboard) -> list[str]:
    session = dashboard.context.new_cdp_session(dashboard.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    by_id = {node["nodeId"]: node for node in nodes}
    return lines_of(nodes[0], by_id, 0)


def lines_of(node: Mapping[str, Any], by_id: Mapping[str, Any], depth: int) -> list[str]:
    """Return an element with its content; of neighbours that are equal, only the first."""
    role = node["role"]["value"]
    is_shown = not (node["ignored"] or role in LEFT_OUT or role[0].isupper())
    found: list[list[str]] = []
    for child in node.get("childIds", []):
        if child in by_id:
            lines = lines_of(by_id[child], by_id, depth + is_shown)
            if lines and lines not in found[-1:]:
                found.append(lines)
    content = [line for lines in found for line in lines]
    if not is_shown:
        return content
    name = "" if role in WITHOUT_NAME else node.get("name", {}).get("value", "")
    return ["  " * depth + f"{role} {NUMBER.sub('N', name)}".rstrip(), *content]
