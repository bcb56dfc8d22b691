"""The browser of a module's tests; its event loop would be in the way of other modules."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from support.corral_cli import PATIENCE_S
from support.dashboard_page import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE_S)
    with chromium() as browser:
        yield browser
