"""Reports of the router: events for the code that runs the instances, and the use of slots.

An engine reports the tokens of complete responses. For a request that was cut off, it reports only
the progress until then, and computes to the end of the batch. The content of its idle slot shows
the total: the computed part of the prompt, and the answer without its last token.

Source: measured on build 10434. The engine's counters (`/metrics`) include tokens of requests that
were cut off, in prefill and in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, ParamSpec

from proxy.errors import UpstreamConnectFailed
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from proxy.router.lease import Lease, ResponseProgress

# Tokens computed after the last event that was read: rarely more than a few.
_UNREAD_MAX: Final = 32
# Events without a token at the start of a response of Anthropic's API.
_TEXTLESS_MAX: Final = 4


# Not frozen, as `SlotUse`: made for each request.
@dataclass(slots=True)
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
        """Same as `total_tokens` in the `usage` of a response."""
        return self.prompt + self.cached + self.decoded


@dataclass(slots=True)
class SlotUse:
    """One request on one instance, from its lease until its slots were idle.

    Attributes:
        client: The name of an API key, or an address; empty for work of our own.
        slot_s: Seconds, times the slots that it held.
        is_exact: Whether the engine reported the tokens; otherwise they are a lower bound.
        is_cut_off: Whether they were read from the slot that is probably its own, or not at all.
    """

    client: str
    model: str
    instance: str
    tokens: Tokens
    slot_s: float
    is_exact: bool = True
    is_cut_off: bool = False


def slot_use(lease: Lease, slots: int, held: Iterable[int]) -> SlotUse:
    """Return the use of a request that is over.

    Args:
        lease: The request's lease.
        slots: The number of slots that it held.
        held: Tokens in each idle slot of the engine, if the request was cut off.
    """
    tokens, is_exact = Tokens(), True
    if found := lease.reported:
        tokens = Tokens(found.prompt_tokens, found.cached_tokens, found.decoded_tokens)
    if not lease.is_reported:
        rest, is_exact = cut_off_tokens(lease.progress, held)
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


def cut_off_tokens(progress: ResponseProgress, held: Iterable[int]) -> tuple[Tokens, bool]:
    """Return the tokens of a request that was cut off, and whether they are exact.

    Args:
        progress: The progress of its response.
        held: Tokens in each idle slot of the engine, its own included if it began.
    """
    total, cached, events = progress.prompt_total, progress.cached, progress.decoded
    if not progress.is_reported:
        return Tokens(decoded=events), False
    done = total if events else progress.prompt_done
    most = total + 2 * events + _UNREAD_MAX
    # The engine does not report its slot. Few tokens were computed but not read, so take the
    # smallest content that is possible.
    least = done + max(0, events - _TEXTLESS_MAX) - bool(events)
    found = min((tokens for tokens in held if least <= tokens <= most), default=None)
    if found is None:
        return Tokens(done - cached, cached, events), False
    # The first token comes with the end of the prompt; the last is not in the cache.
    decoded = found - total + 1 if found >= total else 0
    return Tokens(min(found, total) - cached, cached, decoded), True


_Given = ParamSpec("_Given")


class Signal(Generic[_Given]):
    """Calls what is connected to it, which must not fail or block."""

    def __init__(self) -> None:
        self._handlers: tuple[Callable[_Given, object], ...] = ()

    def connect(self, handler: Callable[_Given, object]) -> None:
        self._handlers = (*self._handlers, handler)

    def __call__(self, *given: _Given.args, **named: _Given.kwargs) -> None:
        for handler in self._handlers:
            handler(*given, **named)


class RouterSignals:
    """What a router reports.

    Attributes:
        idle: A model holds no request any more.
        connect_failed: An instance did not begin its response to a request.
        overdue: An engine still computes although its request ended `cancel_timeout_s` ago; with
            the reason.
        keep_alive: A request wants its local model to stay loaded for so many seconds after it;
            infinity: forever.
        restore_verified: The first response to a prompt ended whose slot was filled with so many
            tokens of it; the instance's name comes first.
        slots_taken: A request, known by its lease, got so many slots of an instance.
        slots_freed: The slots of a request are idle again; called once for each `slots_taken`.
    """

    def __init__(self) -> None:
        self.idle = Signal[[]]()
        self.connect_failed = Signal[[Upstream, UpstreamConnectFailed]]()
        self.overdue = Signal[[Upstream, str]]()
        self.keep_alive = Signal[[str, float]]()
        self.restore_verified = Signal[[str, int, Timings]]()
        self.slots_taken = Signal[[Hashable, Upstream, int]]()
        self.slots_freed = Signal[[Hashable, SlotUse]]()
