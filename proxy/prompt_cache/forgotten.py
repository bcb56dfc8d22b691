"""What was forgotten of conversations, for who deletes their caches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForgottenConversations:
    """Conversations that the router forgot.

    Attributes:
        turn_hashes: Of all their turns, as far as known.
        slots: Idle slots that held them: instance and number.
        numbers: Of the conversations that were known.
    """

    turn_hashes: frozenset[int]
    slots: tuple[tuple[str, int], ...] = ()
    numbers: frozenset[int] = frozenset()
