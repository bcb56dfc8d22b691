"""The dashboard behind a reverse proxy that signs users in, as oauth2-proxy does: by its fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.dashboard_page import Dashboard, chromium

SETTINGS = """
[models.tiny]
path = "{tiny}"
preload = false
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "keys.toml"
[proxy.auth_proxy]
addresses = ["127.0.0.1"]
user_header = "X-Forwarded-Email"
roles = {{ "corral-admins" = "admins", "*" = "guests" }}
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE_S)
    with chromium() as browser:
        yield browser


def test_an_admin_is_signed_in_and_another_user_is_told_why_not(
    browser: Browser, corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(SETTINGS.format(tiny=tiny_model))
    corral.ok("key", "add", "guests")
    key = corral.data("key", "add", "admins", "--admin")["key"]
    corral.serve(until_ready=False)
    until(corral.is_running)
    fields = {"X-Forwarded-Email": "alice@example.com", "X-Forwarded-Groups": "corral-admins"}
    alice = Dashboard(browser.new_context(extra_http_headers=fields), corral.url)
    alice.page.goto(f"{corral.url}/")
    alice.page.get_by_role("heading", name="Overview").wait_for()
    alice.page.get_by_role("button", name="Load tiny").click()
    expect(alice.model("tiny")).to_contain_text("loaded")
    fields = {"X-Forwarded-Email": "bob@example.com", "X-Forwarded-Groups": "staff"}
    bob = Dashboard(browser.new_context(extra_http_headers=fields), corral.url)
    bob.page.goto(f"{corral.url}/corral/")
    expect(bob.page.get_by_role("main")).to_contain_text("user:bob@example.com may not use")
    owner = Dashboard(browser.new_context(), corral.url)
    owner.page.goto(f"{corral.url}/corral/")
    field = owner.page.get_by_label("API key with the admin right")
    field.fill(f"{key}x")
    field.press("Enter")
    expect(owner.page.get_by_role("alert")).to_be_visible()
    field.fill(key)
    owner.page.get_by_role("button", name="Sign in").click()
    owner.page.get_by_role("heading", name="Overview").wait_for()
    assert alice.complaints + bob.complaints + owner.complaints == []
