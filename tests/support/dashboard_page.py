"""Drives the dashboard's page in Chromium, and records its requests and errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Route,
    sync_playwright,
)
from support.corral_cli import PATIENCE_S

Scheme = Literal["light", "dark"]
VIEWS = (
    "overview",
    "models",
    "requests",
    "usage",
    "caches",
    "logs",
    "events",
    "chat",
    "clients",
    "machines",
)
HOW_TO_INSTALL = "no chromium is installed: scripts/browser installs it (apt-get install chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the system's Chromium, or skip the test."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip(HOW_TO_INSTALL)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root or in most containers.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Dashboard:
    """A browser's window with the dashboard; requests to other hosts fail, and are noted."""

    context: BrowserContext
    origin: str
    foreign: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    page: Page = field(init=False)

    def __post_init__(self) -> None:
        self.context.set_default_timeout(1000 * PATIENCE_S)
        self.context.route("**/*", self._route)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        # The browser's own line for a status of 4xx, which the page shows in its way.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def _route(self, route: Route) -> None:
        if route.request.url.startswith(f"{self.origin}/"):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def sign_in(self, link: str) -> None:
        self.page.goto(link)
        self.page.get_by_role("heading", name="Overview").wait_for()

    def show(self, view: str) -> None:
        self.page.evaluate("view => { location.hash = view; }", view)
        title = view.partition("/")[0].capitalize()
        self.page.locator("nav a[aria-current]", has_text=title).wait_for()

    def model(self, name: str) -> Locator:
        return self.page.get_by_role("article", name=name, exact=True)

    def row(self, table: str, text: str) -> Locator:
        return self.page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)

    def violations(self, scheme: Scheme = "light") -> list[str]:
        """Return axe's findings, as rule and place; in the dark only colours differ."""
        options = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
        found = Axe().run(self.page, options=options).response["violations"]
        return [f"{entry['id']}: {node['target']}" for entry in found for node in entry["nodes"]]
