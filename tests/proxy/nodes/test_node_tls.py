"""Nodes by https: refusals and their messages."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError
from support.certificates import expired, write, write_ca
from support.node import SETTINGS, FakeNode, NodesProxy
from support.proxy_harness import ProxyHarness, until

from proxy.errors import NodeUnconnected
from proxy.nodes.configured import NodeAddress, configured_nodes
from proxy.nodes.monitor import NodePoller
from proxy.nodes.settings import NodeSettings, parse_url
from proxy.settings import TlsSettings

LOADED = {"id": "chat", "status": {"value": "loaded"}}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def fake_node(own: trustme.LeafCert) -> AsyncIterator[str]:
    """Run a node with this certificate; return its url."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.configure_cert(context)
    node = FakeNode(LOADED)
    await node.start(context)
    yield node.url.replace("http:", "https:")
    await node.stop()


async def outcome(url: str, **options: Any) -> str:
    """Return the state of a node: "up", or why it is down."""
    emitted: list[str] = []

    def hear(name: str, /, **_: object) -> None:
        emitted.append(name)

    near = NodesProxy(*configured_nodes({"one": NodeSettings(url=url, **options)}, hear))
    async with near.running():
        await until(lambda: bool(near.events("node.up", "node.down")))
        (stats,) = near.nodes.stats()
        return "up" if stats.state == "up" else str(stats.problem)


async def test_a_node_is_trusted_by_its_own_ca(authority: trustme.CA, tmp_path: Path) -> None:
    ca_file = write_ca(tmp_path / "ca.pem", authority)
    async with fake_node(authority.issue_cert("127.0.0.1")) as url:
        assert await outcome(url, ca_file=ca_file) == "up"
        wrong = await outcome(url, ca_file=write_ca(tmp_path / "wrong.pem", trustme.CA()))
        assert "has a certificate that cannot be verified: unable to get" in wrong
        assert wrong.endswith("; set its ca_file")
    async with fake_node(expired(authority)) as url:
        assert "certificate has expired" in await outcome(url, ca_file=ca_file)
    async with fake_node(authority.issue_cert("other.example")) as url:
        assert "not valid for '127.0.0.1'" in await outcome(url, ca_file=ca_file)


async def test_a_node_can_demand_a_client_certificate(
    proxy: ProxyHarness, authority: trustme.CA, tmp_path: Path
) -> None:
    ca_file = write_ca(tmp_path / "ca.pem", authority)
    own = write(tmp_path, authority.issue_cert("127.0.0.1"))
    await proxy.open(tls=TlsSettings(**own, client_ca=ca_file))
    url = proxy.server.url
    ours = write(tmp_path, authority.issue_cert("us"), "ours")
    assert await outcome(url, ca_file=ca_file, **ours) == "up"
    assert "demands a client certificate" in await outcome(url, ca_file=ca_file)
    stranger = write(tmp_path, trustme.CA().issue_cert("us"), "stranger")
    refused = await outcome(url, ca_file=ca_file, **stranger)
    assert "does not accept our client certificate: it does not know its CA" in refused
    late = write(tmp_path, expired(authority, "us"), "late")
    refused = await outcome(url, ca_file=ca_file, **late)
    assert "does not accept our client certificate: it has expired" in refused


async def test_the_certificate_of_a_found_machine_is_for_the_name(
    authority: trustme.CA, tmp_path: Path
) -> None:
    ca_file = write_ca(tmp_path / "ca.pem", authority)
    async with fake_node(authority.issue_cert("corral.test")) as url:
        port = parse_url(url).port
        table = NodeSettings(url=f"dns+https://corral.test:{port}", ca_file=ca_file)
        (node,) = configured_nodes({"pods": table}, lambda _, /, **__: None)
        for hostname, is_valid in (("corral.test", True), ("other.test", False)):
            machine = node.machine_at(NodeAddress("127.0.0.1", port, hostname))
            assert machine.url == url
            poll = NodePoller(machine, SETTINGS).poll()
            if is_valid:
                assert [model.id for model in (await poll)[0]] == ["chat"]
                continue
            with pytest.raises(NodeUnconnected, match=r"not valid for 'other\.test'"):
                await poll


async def test_a_node_that_speaks_no_tls_is_named_so(proxy: ProxyHarness) -> None:
    url = proxy.server.url.replace("http:", "https:")
    assert "does not speak TLS; its url may be http://" in await outcome(url)


async def test_a_renewed_ca_file_is_taken(authority: trustme.CA, tmp_path: Path) -> None:
    ca_file = write_ca(tmp_path / "ca.pem", trustme.CA())
    async with fake_node(authority.issue_cert("127.0.0.1")) as url:
        tables = {"one": NodeSettings(url=url, ca_file=ca_file)}
        (node,) = configured_nodes(tables, lambda _, /, **__: None)
        assert node.tls
        near = NodesProxy(node)
        async with near.running():
            await until(lambda: bool(near.events("node.down")))
            write_ca(ca_file, authority)
            node.tls.renew()
            await until(lambda: near.states() == [True])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://a:1", "ca_file": "ca.pem"}, "for a url with https"),
        ({"url": "https://a:1", "cert": "a.pem"}, "cert and key belong together"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        NodeSettings(**options)
