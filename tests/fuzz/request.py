"""An input to the HTTP part: bytes, and how to send them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

# Written to the keys file of the daemon under attack.
KEY: Final = "fuzz-key-for-all-models"
LIMITED_KEY: Final = "fuzz-key-for-one-model"
NEIGHBOUR_KEY: Final = "key-of-another-client"
_CREDENTIALS: Final = (
    *[(f"Authorization: Bearer {KEY}",)] * 40,
    *[(f"X-Api-Key: {KEY}",)] * 4,
    *[(f"Authorization: Bearer {LIMITED_KEY}",)] * 2,
    (),
    ("Authorization: Bearer wrong-wrong",),
    ("Authorization: Basic Zm9vOmJhcg==",),
    (f"Authorization: Bearer {KEY}", "X-Api-Key: other-key"),
)


@dataclass(frozen=True)
class Input:
    """The actions of one client.

    Attributes:
        kind: For the table.
        pieces: The bytes to send, with `pause_s` between them.
        leave_after_s: Close this long after the last byte; None reads to the end.
        is_reset: Close with RST.
        is_whole: It is complete HTTP, which must get a response.
    """

    kind: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0
    leave_after_s: float | None = None
    is_reset: bool = False
    is_whole: bool = True

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def is_head(self) -> bool:
        return self.pieces[0].startswith(b"HEAD ")

    @property
    def target(self) -> str:
        words = self.pieces[0][:200].partition(b"\r\n")[0].split(b" ")
        return b" ".join(words[:2]).partition(b"?")[0].decode("ascii", "backslashreplace")[:60]

    @property
    def how(self) -> str:
        words = [self.kind, f"{len(self.pieces)} pieces {self.pause_s:g} s apart"]
        if self.leave_after_s is not None:
            words.append(f"leaves after {self.leave_after_s:.2f} s")
        return ", ".join([*words, "by RST"] if self.is_reset else words)


def credentials(random: Random) -> tuple[str, ...]:
    """Credentials: mostly a key without limits."""
    return random.choice(_CREDENTIALS)


def head(
    method: str, target: str, fields: tuple[str, ...] = (), *, host: str = "localhost"
) -> bytes:
    lines = (f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *fields)
    return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape")


def post(
    path: str, body: bytes, fields: tuple[str, ...] = (), kind: str = "application/json"
) -> bytes:
    length = (f"Content-Length: {len(body)}", f"Content-Type: {kind}")
    return head("POST", path, (*length, *fields)) + body
