"""From `request.finished` events to what is recorded of them. Does no I/O."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any, Final

from proxy.endpoints import EndpointKind
from supervisor.request_record.recorded_request import RecordedRequest

_CONVERSATIONS_MAX: Final = 4096
_NUMBER_BITS: Final = 48
_EMBEDDING: Final = EndpointKind.EMBED_OR_RERANK.name.lower()


@dataclass(frozen=True, slots=True)
class _Conversation:
    number: int
    ended_at: datetime


class Observer:
    """What it takes to tell pauses: when the last request of each conversation ended.

    `new_number` returns a random number for each conversation.
    """

    def __init__(
        self, new_number: Callable[[], int] = lambda: secrets.randbits(_NUMBER_BITS)
    ) -> None:
        self._new_number = new_number
        self._conversations: OrderedDict[tuple[str, int], _Conversation] = OrderedDict()
        self._began_at: dict[str, datetime] = {}

    def observe(self, at: datetime, fields: Mapping[str, Any]) -> RecordedRequest | None:
        """Return what to record of a request that ended; None where it was not answered.

        Args:
            at: When it ended.
            fields: Of `request.finished`.
        """
        if fields["status"] != HTTPStatus.OK or fields["prompt_tokens"] is None:
            return None
        if fields["kind"] == _EMBEDDING:  # it cannot be replayed as a completion
            return None
        model, duration_s = fields["model"], fields["duration_ms"] / 1000
        began_at = at - timedelta(seconds=duration_s)
        before = self._began_at.get(model)
        self._began_at[model] = began_at
        number, after_own_s = self._conversation(model, fields["conversation"], began_at, at)
        return RecordedRequest(
            kind=fields["kind"],
            conversation=number,
            prompt_tokens=fields["prompt_tokens"] + fields["cached_tokens"],
            cached_tokens=fields["cached_tokens"],
            generated_tokens=fields["decoded_tokens"],
            after_any_s=_seconds(began_at - before) if before else None,
            after_own_s=after_own_s,
            duration_s=round(duration_s, 3),
        )

    def _conversation(
        self, model: str, number: int | None, began_at: datetime, ended_at: datetime
    ) -> tuple[int | None, float | None]:
        """Return the recorded number of a conversation, and the pause since its last request."""
        if number is None:
            return None, None
        last = self._conversations.get((model, number))
        recorded = last.number if last else self._new_number()
        self._conversations[model, number] = _Conversation(recorded, ended_at)
        self._conversations.move_to_end((model, number))
        if len(self._conversations) > _CONVERSATIONS_MAX:
            self._conversations.popitem(last=False)
        return recorded, max(0.0, _seconds(began_at - last.ended_at)) if last else None


def _seconds(duration: timedelta) -> float:
    return round(duration.total_seconds(), 3)
