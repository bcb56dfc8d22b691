"""A lease: the right to use one slot of one instance for one request, and how far that has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from proxy.errors import ProxyError
from proxy.prompt_cache.slot_map import TrackedSlot
from proxy.request import ProxyRequest
from proxy.router.computation import Ending
from proxy.router.in_flight import InFlightRequest
from proxy.router.instances import Instance
from proxy.upstream.timings import Timings

# An engine's HTTP threads send `:` lines in an open stream whether or not it still computes.
# Source: llama-server --sse-ping-interval; WHATWG HTML, section "Interpreting an event stream".
_PING: Final = b":\r\n "


class Clock(Protocol):
    """Tells monotonic time."""

    def __call__(self) -> float:
        """Return seconds since some moment."""


class LeaseOwner(Protocol):
    """Who gave the lease, and hears what becomes of it."""

    def release(self, lease: Lease, /) -> None:
        """Take the slot back; nothing where it is back already."""

    def record_result(self, lease: Lease, timings: Timings | None, mark: int | None, /) -> None:
        """Hear what the instance did, and by what the answered prompt will be known."""


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """What is known of a slot in use at one moment.

    Attributes:
        request_id: The request's name.
        client: Who asked.
        phase: `prefill` before the first token, `decode` from then on, `ending` where the request
            is over and the engine has yet to say that the slot is idle.
        prompt_done: Tokens of the prompt that are computed or were cached.
        prompt_total: Tokens of the prompt; a guess until the instance says it.
        cached: Tokens of the prompt that came from its cache; 0 until it says so.
        decoded: Events of generated text so far.
        began_at_s: Monotonic time at which the slot was given.
        first_token_at_s: Monotonic time of the first event of text, or None.
    """

    request_id: str
    client: str
    phase: Literal["prefill", "decode", "ending"]
    prompt_done: int
    prompt_total: int
    cached: int
    decoded: int
    began_at_s: float
    first_token_at_s: float | None


class Lease:
    """The right to use an instance for one request; made by `Router.lease`.

    Attributes:
        upstream: The instance.
        instance: Where it sits.
        expected_cached: Tokens of the prompt that its cache is believed to hold.
        queued_s: Seconds the request waited for its turn.
        position: Its place in line when it joined, 1 for the next in turn; 0 if it did not wait.
        conversation: The conversation it belongs to, the same object for all its turns; None for
            none.
        slot: The slot it is believed to use, where that is followed; None where it is not.
        verifies_restore: Whether its answer shows what became of the conversation its slot began
            with.
        is_ending: Whether the request is over and the slot is not known to be idle yet.
        ended_at_s: Monotonic time at which the request was over, where it is ending.
        beside: Further slots that the request uses, in the order of the instance's choice.
        ending_of_process: How the process ended that computes it, where that is told.
        is_overdue: Whether it was reported that the engine does not stop computing for it.
    """

    def __init__(
        self,
        request: ProxyRequest,
        instance: Instance,
        clock: Clock,
        keeper: LeaseOwner | None = None,
        first: Lease | None = None,
    ) -> None:
        """Make it.

        Args:
            request: The request.
            instance: Where the instance sits.
            clock: Monotonic time.
            keeper: Who hears what becomes of it.
            first: The lease of the same request's first slot, where this is a further one.
        """
        self.upstream = instance.upstream
        self.instance = instance
        self.request = request
        self.expected_cached = 0
        self.queued_s = 0.0
        self.position = 0
        self.conversation: object | None = None
        self.slot: TrackedSlot | None = None
        self.verifies_restore = False
        self.is_ending = False
        self.ended_at_s = 0.0
        self.ending_of_process = Ending()
        self.is_overdue = False
        self.beside: tuple[Lease, ...] = ()
        self._first = first
        self.began_at_s = clock()
        self._clock = clock
        self._keeper = keeper
        self._in_flight: InFlightRequest | None = None
        self._done, self._cached, self._decoded = 0, 0, 0
        # The answers to one prompt share what is computed of it.
        self._total = request.prompt.tokens if request.prompt and first is None else 0
        self._first_token_at_s: float | None = None

    # What whoever carries the request tells.

    def count_bytes(self, chunk: bytes) -> None:
        """Note bytes of the answer; until `listen`, it is for the client to go on."""
        if self._in_flight:
            self._in_flight.is_awaited = False
        if chunk.strip(_PING):
            self.instance.bytes_received += len(chunk)

    def await_upstream(self) -> None:
        """Note that the client took them: it is for the instance to go on."""
        if self._in_flight:
            self._in_flight.is_awaited = True

    def set_prefill_progress(self, done: int, total: int, cached: int) -> None:
        """Note how many tokens of the prompt are computed, how many it has, how many were cached.

        Source: `prompt_progress` of llama-server, build 11434; what was cached counts as done.
        """
        self._done, self._total, self._cached = done, total, cached

    def count_tokens(self, count: int = 1) -> None:
        """Note so many events of generated text."""
        if self._first_token_at_s is None:
            self._first_token_at_s = self._clock()
        self._decoded += count

    def complete(self) -> None:
        """Note that the instance has sent its whole answer: its slot is free at once."""
        if self._keeper:
            for lease in self.slots:
                self._keeper.release(lease)

    def record_result(self, timings: Timings | None, reply: Mapping[str, Any] | None) -> None:
        """Note what the instance said of an answer that is complete.

        Args:
            timings: What it did, or None where it did not say.
            reply: The answer, as an assistant's message in the words of OpenAI's chat API, by
                which the next turn of the conversation is known; None where it is none.
        """
        if self._keeper:
            prompt = self.request.prompt
            mark = prompt.hash_with_reply(reply) if prompt and reply else None
            self._keeper.record_result(self, timings, mark)

    # What whoever gave it asks and tells.

    def attach(self, request: InFlightRequest) -> None:
        """Note that the request begins."""
        self._in_flight = request

    def cut(self, error: ProxyError) -> None:
        """End the request with this error, if it is under way."""
        if self._in_flight:
            self._in_flight.abort(error)

    @property
    def slots(self) -> tuple[Lease, ...]:
        """Return the leases of all slots that the request uses."""
        return (self, *self.beside)

    @property
    def has_text(self) -> bool:
        """Return whether text was generated."""
        return self._decoded > 0

    @property
    def has_begun(self) -> bool:
        """Return whether the request is or was under way."""
        return self._in_flight is not None

    @property
    def backlog_tokens(self) -> int:
        """Return how many tokens of the prompt the instance still has to compute."""
        if self._decoded or self.is_ending:
            return 0
        return max(0, self._total - max(self._done, self.expected_cached))

    def end(self) -> None:
        """Note that the request is over, and that the slot may still be in use."""
        self.is_ending = True
        self.ended_at_s = self._clock()

    def stats(self) -> LeaseStats:
        """Return what is known of the slot."""
        has_text = (self._first or self).has_text
        begun: Literal["prefill", "decode"] = "decode" if has_text else "prefill"
        return LeaseStats(
            request_id=self.request.request_id,
            client=self.request.client,
            phase="ending" if self.is_ending else begun,
            prompt_done=self._total if self._decoded else self._done,
            prompt_total=self._total,
            cached=self._cached,
            decoded=self._decoded,
            began_at_s=self.began_at_s,
            first_token_at_s=self._first_token_at_s,
        )
