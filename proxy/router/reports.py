"""What the router reports, such as what a request took of an engine: tokens, and time of its slots.

An engine reports the tokens of complete responses. Of a request that was cut off, it reports its
progress up to then, and computes to the end of a batch; what its slot holds when it is idle shows
what it computed in all: the prompt, as far as that was computed, and the answer without its last
token.

Source: measured on build 10434. Its counters (`/metrics`) include what was computed for requests
that were cut off, in prefill and in decoding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from proxy.errors import UpstreamConnectFailed
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from proxy.router.lease import Lease, ResponseProgress

# What an engine computes after the last event that was read: rarely more than a few tokens.
_UNREAD_MAX: Final = 32
# Events without a token, which Anthropic's API has at the start.
_TEXTLESS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens computed, prompt tokens taken from the cache, and tokens generated."""

    prompt: int = 0
    cached: int = 0
    decoded: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt + other.prompt, self.cached + other.cached, self.decoded + other.decoded
        )

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt - other.prompt, self.cached - other.cached, self.decoded - other.decoded
        )

    @property
    def total(self) -> int:
        """As `total_tokens` in the `usage` of a response."""
        return self.prompt + self.cached + self.decoded


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One request on one instance, from its lease until its slots were idle.

    Attributes:
        client: The name of an API key, or an address; empty for work of our own.
        slot_s: Seconds, times the slots that it held.
        is_exact: Whether the engine told the tokens; else it counted at least as many.
        is_cut_off: Whether they are told by a slot that is believed to be its own, or not at all.
    """

    client: str
    model: str
    instance: str
    tokens: Tokens
    slot_s: float
    is_exact: bool = True
    is_cut_off: bool = False


def use_of(lease: Lease, slots: int, held: Iterable[int]) -> SlotUse:
    """What a request took that is over.

    Args:
        lease: Its own.
        slots: How many it held.
        held: Tokens in each idle slot of the engine, where it was cut off.
    """
    tokens, is_exact = Tokens(), True
    if found := lease.reported:
        tokens = Tokens(found.prompt_tokens, found.cached_tokens, found.decoded_tokens)
    if not lease.is_reported:
        rest, is_exact = of_cut_off(lease.progress, held)
        tokens += rest
    request = lease.request
    client = "" if request.is_background else request.client
    slot_s = (lease.clock() - lease.began_at_s) * slots
    return SlotUse(
        client,
        request.model,
        lease.upstream.name,
        tokens,
        slot_s,
        is_exact,
        is_cut_off=not lease.is_reported,
    )


def of_cut_off(progress: ResponseProgress, held: Iterable[int]) -> tuple[Tokens, bool]:
    """The tokens of a request that was cut off, and whether they are exact.

    Args:
        progress: What was read of its response.
        held: Tokens in each idle slot of the engine, its own among them if it began.
    """
    total, cached, events = progress.prompt_total, progress.cached, progress.decoded
    if not progress.is_reported:
        return Tokens(decoded=events), False
    done = total if events else progress.prompt_done
    most = total + 2 * events + _UNREAD_MAX
    # Which slot it had is not told. Little was computed that was not read, so it holds the least.
    least = done + max(0, events - _TEXTLESS_MAX) - bool(events)
    found = min((tokens for tokens in held if least <= tokens <= most), default=None)
    if found is None:
        return Tokens(done - cached, cached, events), False
    # The first token comes with the end of the prompt; the last is not in the cache.
    decoded = found - total + 1 if found >= total else 0
    return Tokens(min(found, total) - cached, cached, decoded), True


class RouterListener(Protocol):
    """Runs the instances. None of these may fail or block."""

    def idle(self) -> None:
        """A model holds no request any more."""

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None:
        """An instance did not begin to answer a request."""

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        """An engine still computes `cancel_timeout_s` after its request is over."""

    def keep_alive(self, model: str, seconds: float, /) -> None:
        """A request that begins wants its model, of this machine, to stay loaded so long after it.

        Infinite: for ever.
        """

    def restore_verified(self, name: str, tokens: int, timings: Timings, /) -> None:
        """The first response to a prompt in a slot that was filled with so many tokens of it."""

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int, /) -> None:
        """A request got slots of an instance."""

    def slots_freed(self, lease: Hashable, use: SlotUse, /) -> None:
        """Its slots are idle again; each request that got slots frees them once."""


class NoListener:
    def idle(self) -> None: ...

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None: ...

    def overdue(self, upstream: Upstream, reason: str, /) -> None: ...

    def keep_alive(self, model: str, seconds: float, /) -> None: ...

    def restore_verified(self, name: str, tokens: int, timings: Timings, /) -> None: ...

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int, /) -> None: ...

    def slots_freed(self, lease: Hashable, use: SlotUse, /) -> None: ...


NO_LISTENER: Final = NoListener()
