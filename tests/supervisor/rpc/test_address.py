from __future__ import annotations

import socket

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.rpc.address import WorkerAddress, check_listen_host, check_port, free_port
from supervisor.settings.tables import exposure


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", "loopback"),
        ("127.8.0.1", "loopback"),
        ("localhost", "loopback"),
        ("10.0.0.1", "private"),
        ("172.31.255.1", "private"),
        ("172.32.0.1", "public"),
        ("192.168.1.7", "private"),
        ("100.64.0.1", "private"),
        ("100.128.0.1", "public"),
        ("169.254.1.1", "private"),
        ("8.8.8.8", "public"),
        ("0.0.0.0", "every"),  # noqa: S104 (nothing is bound)
        ("gpu-box", None),
        ("::1", None),
    ],
)
def test_who_reaches_an_address(host: str, found: str | None) -> None:
    assert exposure(host) == found


def test_seed_000_a_worker_listens_on_loopback_without_a_warning() -> None:
    assert check_listen_host("127.0.0.1") is None


def test_seed_000_a_private_address_gets_a_warning_that_nothing_protects_it() -> None:
    warning = check_listen_host("192.168.1.7")
    assert warning
    assert "no authentication and no encryption" in warning


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "8.8.8.8", "gpu-box", "::"],  # noqa: S104 (nothing is bound)
)
def test_seed_000_no_worker_listens_where_all_can_reach_it(host: str) -> None:
    with pytest.raises(SettingsInvalid, match=r"listen on") as caught:
        check_listen_host(host)
    assert "private address" in str(caught.value.hint)


def test_a_taken_port_is_known_before_a_start() -> None:
    check_port(WorkerAddress("a", "127.0.0.1", free_port()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = WorkerAddress("a", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            check_port(taken)
