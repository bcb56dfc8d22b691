"""A peer on a worker's port that is no good worker: one fault each."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Literal

from support.corral_cli import PATIENCE_S

PeerFault = Literal["other version", "not rpc", "silent"]

# Source: ggml-rpc.cpp: u8 command, u64 size, payload; a response has u64 size, payload.
_HELLO: Final = bytes([9, 0, 0, 0]) + bytes(24)


@contextmanager
def peer(fault: PeerFault) -> Iterator[int]:
    """Serve on a port of 127.0.0.1 until the block ends; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server, fault), daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def _serve(server: socket.socket, fault: PeerFault) -> None:
    held = []
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            if fault == "silent":
                held.append(client)
                continue
            with client, suppress(OSError):
                _answer(client, fault)
    for client in held:
        client.close()


def _answer(client: socket.socket, fault: PeerFault) -> None:
    if not client.recv(9 + 24, socket.MSG_WAITALL):  # command, size and data of HELLO
        return
    if fault == "other version":
        client.sendall(struct.pack("<Q", len(_HELLO)) + _HELLO)
    else:
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
