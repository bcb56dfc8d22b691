"""What the proxy needs of the supervisor: conversations that are forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proxy.requests.history import StoredRequest


@dataclass(frozen=True, slots=True)
class ForgottenConversation:
    """What was deleted of a conversation.

    Attributes:
        files: On disk.
        slots: That engines emptied.
        in_use: Whether a request in flight is still of it.
    """

    files: int
    slots: int
    in_use: bool


class Conversations(Protocol):
    async def forget_of(self, request: StoredRequest, /) -> ForgottenConversation | None:
        """Forget the conversation of a request that has ended; None where it is not known."""
