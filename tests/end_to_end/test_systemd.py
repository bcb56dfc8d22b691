"""The daemon as a service of systemd, whose side of the protocols the test plays."""

import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from corral_cli import PATIENCE_S, CorralCli, begin_stream
from notify_peer import NotifyPeer, abstract_address


@pytest.fixture
def systemd(corral: CorralCli) -> Iterator[NotifyPeer]:
    peer = NotifyPeer(abstract_address())
    corral.env |= {"NOTIFY_SOCKET": peer.address, "WATCHDOG_USEC": "200000"}
    yield peer
    peer.close()


def configure(corral: CorralCli, model: Path) -> None:
    corral.configure(f'[models.tiny]\npath = "{model}"\n')


def test_ready_comes_once_the_daemon_listens_and_before_the_model_is_loaded(
    corral: CorralCli, systemd: NotifyPeer, tiny_model: Path
) -> None:
    configure(corral, tiny_model)
    corral.serve(until_ready=False)
    systemd.until_has("READY")
    with urllib.request.urlopen(f"{corral.url}/v1/models", timeout=PATIENCE_S) as answer:
        assert answer.status == 200
    seen = systemd.until(lambda one: one.get("STATUS") == "1 of 1 instances ready")
    assert any("loading tiny.0" in one.get("STATUS", "") for one in seen)
    systemd.until_has("WATCHDOG")


def test_a_daemon_that_cannot_listen_is_never_ready(
    corral: CorralCli, systemd: NotifyPeer, tiny_model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n[proxy]\nlisten = "{listen}"\n')
        assert corral.serve(until_ready=False).wait(PATIENCE_S) == 1
    assert systemd.arrived() == []


def test_a_reload_and_a_stop_are_reported(
    corral: CorralCli, systemd: NotifyPeer, slow_model: Path
) -> None:
    configure(corral, slow_model)
    daemon = corral.serve()
    systemd.until_has("READY")
    daemon.send_signal(signal.SIGHUP)
    assert "MONOTONIC_USEC" in systemd.until_has("RELOADING")[-1]
    systemd.until_has("READY")
    stream = begin_stream(corral, 60)
    daemon.send_signal(signal.SIGTERM)
    assert "EXTEND_TIMEOUT_USEC" in systemd.until_has("STOPPING")[-1]
    systemd.until_has("WATCHDOG")  # also while it drains
    assert stream.read().rstrip().endswith(b"data: [DONE]")
    assert daemon.wait(PATIENCE_S) == 0
