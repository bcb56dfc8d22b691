"""An input to the HTTP part: bytes, and how they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

# Written to the keys file of the daemon that is attacked.
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
    """What one client does.

    Attributes:
        kind: A word for the table.
        pieces: The bytes, in the order they are sent.
        pause_s: Between two pieces.
        leave_after_s: The client closes so long after its last byte; None reads to the end.
        is_reset: Whether it leaves by RST.
        is_whole: Whether this is HTTP that must be answered.
    """

    kind: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0
    leave_after_s: float | None = None
    is_reset: bool = False
    is_whole: bool = True

    @property
    def data(self) -> bytes:
        """All bytes."""
        return b"".join(self.pieces)

    @property
    def is_head(self) -> bool:
        """Whether the answer has no body."""
        return self.pieces[0].startswith(b"HEAD ")

    @property
    def target(self) -> str:
        """Method and path, for the name of a finding."""
        words = self.pieces[0][:200].partition(b"\r\n")[0].split(b" ")
        return b" ".join(words[:2]).partition(b"?")[0].decode("ascii", "backslashreplace")[:60]

    @property
    def how(self) -> str:
        """How it is sent, in words."""
        words = [self.kind, f"{len(self.pieces)} pieces {self.pause_s:g} s apart"]
        if self.leave_after_s is not None:
            words.append(f"leaves after {self.leave_after_s:.2f} s")
        return ", ".join([*words, "by RST"] if self.is_reset else words)


def credentials(random: Random) -> tuple[str, ...]:
    """Return header fields that say who asks: mostly with a key that may do everything."""
    return random.choice(_CREDENTIALS)


def head(
    method: str, target: str, fields: tuple[str, ...] = (), *, host: str = "localhost"
) -> bytes:
    """Return a header, with its last empty line."""
    lines = (f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *fields)
    return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape")


def post(
    path: str, body: bytes, fields: tuple[str, ...] = (), kind: str = "application/json"
) -> bytes:
    """Return a POST whose length is right."""
    length = (f"Content-Length: {len(body)}", f"Content-Type: {kind}")
    return head("POST", path, (*length, *fields)) + body
