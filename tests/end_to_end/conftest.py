"""The browser of a module's tests, whose loop would be in the way of other modules; a node."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.dashboard_page import chromium
from support.fork_server import ForkServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE_S)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def node_url(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[str]:
    """Run another daemon, which has no models: those of its own node, which is down."""
    node = CorralCli(tmp_path_factory.mktemp("n"), fork_server)
    node.configure('[nodes.none]\nurl = "http://127.0.0.1:9"')
    node.serve(until_ready=False)
    until(node.is_running)
    yield node.url
    node.end()
