"""Figures of both sides of a trial, in bounded memory. Does no I/O.

Figures are kept by conversation: requests of one resemble each other. A conversation counts for the
side that serves it, from its first request until it changes sides. One that began where it was not
meant to, as its side was full or not ready, counts for neither: such conversations come from busy
moments, and would make the side that helps look slower.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Literal

from supervisor.trial.equal_load import Value
from supervisor.trial.over_time import Timed

SideName = Literal["base", "trial"]
SIDES: Final[tuple[SideName, SideName]] = ("base", "trial")

_CONVERSATIONS_MAX: Final = 1000
_REQUESTS_MAX: Final = 32
_TIMED_MAX: Final = 8192
# The rate of a shorter answer is mostly noise.
_TOKENS_MIN: Final = 4
_OTHERS_MAX: Final = 7


@dataclass(slots=True)
class Conversation:
    """The latest values of a conversation's requests, at most 32 of each, with their load.

    Attributes:
        rates: Tokens per second while decoding.
        first_tokens_s: Seconds from a request's arrival to its first token.
        is_excluded: Its side was full or not ready at a request: none from then on has values.
    """

    rates: deque[Value] = field(default_factory=lambda: deque(maxlen=_REQUESTS_MAX))
    first_tokens_s: deque[Value] = field(default_factory=lambda: deque(maxlen=_REQUESTS_MAX))
    is_excluded: bool = False


@dataclass(slots=True)
class Side:
    """What is known of one side.

    Attributes:
        conversations: The latest 1000.
        timed_rates: The latest values of all conversations, with their time.
        timed_first_tokens_s: Likewise.
        others: Other requests that its engine had during each request, summed over requests.
    """

    conversations: OrderedDict[str, Conversation] = field(default_factory=OrderedDict)
    timed_rates: deque[Timed] = field(default_factory=lambda: deque(maxlen=_TIMED_MAX))
    timed_first_tokens_s: deque[Timed] = field(default_factory=lambda: deque(maxlen=_TIMED_MAX))
    requests: int = 0
    errors: int = 0
    crashes: int = 0
    others: int = 0

    @property
    def excluded(self) -> int:
        return sum(one.is_excluded for one in self.conversations.values())

    @property
    def rates(self) -> list[Sequence[Value]]:
        return [list(one.rates) for one in self.conversations.values() if one.rates]

    @property
    def first_tokens_s(self) -> list[Sequence[Value]]:
        found = self.conversations.values()
        return [list(one.first_tokens_s) for one in found if one.first_tokens_s]

    def latest(self, key: str) -> Conversation:
        """Return a conversation, as the latest; the oldest is forgotten where there are many."""
        found = self.conversations.setdefault(key, Conversation())
        self.conversations.move_to_end(key)
        if len(self.conversations) > _CONVERSATIONS_MAX:
            self.conversations.popitem(last=False)
        return found


class TrialFigures:
    """The figures of one model's trial, since its beginning."""

    def __init__(self) -> None:
        self.sides: dict[SideName, Side] = {name: Side() for name in SIDES}

    def crashed(self, side: SideName) -> None:
        self.sides[side].crashes += 1

    def failed(self, side: SideName) -> None:
        """Count a request that the other side answered, as this one failed it."""
        self.sides[side].requests += 1
        self.sides[side].errors += 1

    def finished(
        self,
        name: SideName,
        fields: Mapping[str, Any],
        others: int,
        at_s: float = 0.0,
        *,
        is_fair: bool = True,
    ) -> None:
        """Count a request.

        Args:
            name: The side that answered it.
            fields: Of `request.finished`.
            others: Other requests that its engine had meanwhile.
            at_s: When it ended; monotonic.
            is_fair: Whether both sides could have answered it.
        """
        side, status = self.sides[name], fields["status"]
        side.requests += 1
        side.others += others
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            side.errors += 1
        conversation = self._conversation(name, fields)
        conversation.is_excluded |= not is_fair or bool(fields["diverted"])
        if status == HTTPStatus.OK and not conversation.is_excluded:
            _add(side, conversation, fields, min(others, _OTHERS_MAX), at_s)

    def _conversation(self, name: SideName, fields: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a request; one that the other side has is excluded."""
        key = str(fields["conversation"] or fields["request"])
        if other := self.sides["base" if name == "trial" else "trial"].conversations.get(key):
            other.is_excluded = True
            return other
        return self.sides[name].latest(key)


def _add(
    side: Side, conversation: Conversation, fields: Mapping[str, Any], others: int, at_s: float
) -> None:
    if (first_token_ms := fields["first_token_ms"]) is not None:
        conversation.first_tokens_s.append((first_token_ms / 1000, others))
        side.timed_first_tokens_s.append((at_s, first_token_ms / 1000, others))
    tokens = fields["decoded_tokens"] or 0
    decode_ms = fields["engine_decode_ms"] or fields["decode_ms"]
    if tokens >= _TOKENS_MIN and decode_ms > 0:
        rate = (tokens - 1) * 1000 / decode_ms
        conversation.rates.append((rate, others))
        side.timed_rates.append((at_s, rate, others))
