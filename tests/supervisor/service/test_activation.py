import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.service.notifier import activation_sockets, listen_address

PID = os.getpid()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


ONE_SOCKET = {"LISTEN_PID": str(PID), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}


def passed(listener: socket.socket) -> int:
    """Return the descriptor of an inheritable copy of a socket."""
    copy = os.dup(listener.fileno())
    os.set_inheritable(copy, True)  # noqa: FBT003 (positional only)
    return copy


def test_a_socket_is_taken_and_no_child_inherits_it(listening: socket.socket) -> None:
    (taken,) = activation_sockets(ONE_SOCKET, PID, first_descriptor=passed(listening))
    with taken:
        assert taken.getsockname() == listening.getsockname()
        assert not taken.get_inheritable()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": str(PID + 1), "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(PID), "LISTEN_FDS": "0"},
        {"LISTEN_PID": str(PID), "LISTEN_FDS": "one"},
    ],
)
def test_variables_that_mean_another_process_are_ignored(environ: dict[str, str]) -> None:
    assert activation_sockets(environ, PID) == ()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_does_not_listen_is_refused_by_its_name(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as silent:
        copy = passed(silent)
        with pytest.raises(SettingsInvalid, match=r"\(http\) .* not a listening TCP socket"):
            activation_sockets(ONE_SOCKET, PID, first_descriptor=copy)
    os.close(copy)


def test_a_file_is_refused() -> None:
    refused = pytest.raises(SettingsInvalid, match="not a listening TCP socket")
    with Path(os.devnull).open("rb") as file, refused:
        activation_sockets(ONE_SOCKET, PID, first_descriptor=file.fileno())


def test_too_many_sockets_are_refused() -> None:
    with pytest.raises(SettingsInvalid, match="at most 16"):
        activation_sockets({"LISTEN_PID": str(PID), "LISTEN_FDS": "17"}, PID)


def test_the_address_is_one_that_other_machines_reach(listening: socket.socket) -> None:
    assert listen_address([]) is None
    assert listen_address([listening]) == f"127.0.0.1:{listening.getsockname()[1]}"
    with socket.create_server(("0.0.0.0", 0)) as public:  # noqa: S104 (as a test of it)
        port = public.getsockname()[1]
        assert listen_address([listening, public]) == f"0.0.0.0:{port}"


def test_an_ipv6_address_has_brackets() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as found:
        assert listen_address([found]) == f"[::1]:{found.getsockname()[1]}"
