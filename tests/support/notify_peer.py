"""systemd's side of sd_notify(3)."""

import queue
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 120


class NotifyPeer:
    """Receives the messages of a service; an `address` with `@` is abstract.

    A thread reads them, because the kernel queues only a few (net.unix.max_dgram_qlen).
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._target = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._target)
        self._messages: queue.Queue[dict[str, str]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while data := self._socket.recv(4096):
            pairs = (line.partition("=") for line in data.decode().splitlines())
            self._messages.put({name: value for name, _, value in pairs})

    def _send(self, message: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
            ours.sendto(message, self._target)

    def close(self) -> None:
        self._send(b"")
        self._reader.join()
        self._socket.close()

    def next(self) -> dict[str, str]:
        """Wait for a message."""
        return self._messages.get(timeout=PATIENCE_S)

    def until(self, is_wanted: Callable[[dict[str, str]], object]) -> list[dict[str, str]]:
        """Wait for a message; return it behind all that came before it."""
        seen = [self.next()]
        while not is_wanted(seen[-1]):
            seen.append(self.next())
        return seen

    def until_has(self, name: str) -> list[dict[str, str]]:
        return self.until(lambda message: name in message)

    def arrived(self) -> list[dict[str, str]]:
        """Return all that was sent until now and not read."""
        mark = secrets.token_hex(8)
        self._send(f"MARK={mark}".encode())
        return self.until(lambda message: message.get("MARK") == mark)[:-1]


def abstract_address() -> str:
    return f"@llama-corral-test/{secrets.token_hex(8)}"


def path_address(directory: Path) -> str:
    return str(directory / "notify")
