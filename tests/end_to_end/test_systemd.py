"""The daemon as a service of systemd, whose side of the protocols the test plays."""

import http.client
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, until
from support.notify_peer import NotifyPeer, abstract_address
from support.steady_client import SteadyClient


@pytest.fixture
def systemd(corral: CorralCli) -> Iterator[NotifyPeer]:
    peer = NotifyPeer(abstract_address())
    corral.env |= {"NOTIFY_SOCKET": peer.address, "WATCHDOG_USEC": "200000"}
    yield peer
    peer.close()


@pytest.fixture
def kept() -> Iterator[socket.socket]:
    """A listening socket that systemd keeps over restarts."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as kept:
        yield kept


# Becomes the program of its arguments, with the descriptor that the first one names as number 3.
AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def activated(corral: CorralCli, kept: socket.socket) -> subprocess.Popen[bytes]:
    """Start a daemon as systemd does when it has a socket for it."""
    launch = [sys.executable, "-c", AS_SYSTEMD, str(kept.fileno())]
    with (corral.root / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [*launch, *corral.argv("serve")],
            env=corral.env,
            cwd=corral.root,
            pass_fds=[kept.fileno()],
            stderr=stderr,
        )


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
    seen = systemd.until(lambda message: message.get("STATUS") == "1 of 1 instances ready")
    assert any("loading tiny.0" in entry.get("STATUS", "") for entry in seen)
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
    stream = begin_stream(corral, 400)  # longer than many intervals of the watchdog
    daemon.send_signal(signal.SIGTERM)
    assert "EXTEND_TIMEOUT_USEC" in systemd.until_has("STOPPING")[-1]
    systemd.until_has("WATCHDOG")  # also while it drains
    assert stream.read().rstrip().endswith(b"data: [DONE]")
    assert daemon.wait(PATIENCE_S) == 0


def test_no_request_is_refused_over_a_restart(
    corral: CorralCli, kept: socket.socket, tiny_model: Path
) -> None:
    configure(corral, tiny_model)
    port = kept.getsockname()[1]
    clients = [SteadyClient(port, keep_alive=keep_alive) for keep_alive in (False, True)]
    for client in clients:
        client.start()  # connects before any daemon listens
    first = activated(corral, kept)
    until(lambda: all(client.answered > 2 for client in clients))
    assert corral.url == f"http://127.0.0.1:{port}"
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 0
    before = [client.answered for client in clients]
    second = activated(corral, kept)
    until(lambda: all(now.answered > was + 2 for now, was in zip(clients, before, strict=True)))
    for client in clients:
        client.is_stopped = True
        client.join()
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    assert [failure for client in clients for failure in client.failures] == []
    assert "listen is 127.0.0.1:0 in the settings" in (corral.root / "stderr").read_text("utf-8")


def test_a_last_request_while_it_drains_gets_a_model_that_was_not_loaded(
    corral: CorralCli, kept: socket.socket, tiny_model: Path, slow_model: Path
) -> None:
    corral.configure(
        f'[models.slow]\npath = "{slow_model}"\n[models.tiny]\npath = "{tiny_model}"\n'
        "preload = false\n[proxy]\nqueue_timeout_s = 20\n"
    )
    daemon = activated(corral, kept)
    client = http.client.HTTPConnection("127.0.0.1", kept.getsockname()[1], timeout=PATIENCE_S)
    client.request("GET", "/v1/models")
    client.getresponse().read()
    stream = begin_stream(corral, 60, model="slow")
    daemon.send_signal(signal.SIGTERM)
    until(lambda: corral.status().stopping)
    client.request("POST", "/v1/completions", '{"model": "tiny", "prompt": "a", "max_tokens": 2}')
    answer = client.getresponse()
    assert (answer.status, answer.headers["Connection"]) == (200, "close")
    client.close()
    assert stream.read().rstrip().endswith(b"data: [DONE]")
    assert daemon.wait(PATIENCE_S) == 0
