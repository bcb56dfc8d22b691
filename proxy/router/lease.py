"""Instances, leases, and how far a response has come.

A lease is the right to use one slot of one instance for one request. An instance knows its leases,
and a lease its instance, so both stand here.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Protocol

from aiorwlock import RWLock

from proxy.cache.slot_files import SavedPrompt
from proxy.cache.slot_map import SlotOwners, TrackedSlot
from proxy.errors import (
    ContextTooLong,
    Unfinished,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamUnavailable,
    UpstreamUnconnected,
)
from proxy.observe.cache_finding import CacheFinding, Tier
from proxy.observe.in_flight import InFlight, InFlightRequest
from proxy.request.request import ProxyRequest
from proxy.request.variants import MARK
from proxy.router.measures import FinishedRequests
from proxy.router.policy import EQUAL, Speed, Weight
from proxy.upstream.timings import Rates, Timings
from proxy.upstream.upstream import Upstream

# An engine's HTTP threads send `:` lines in an open stream whether or not it still computes.
# Source: llama-server --sse-ping-interval; WHATWG HTML, section "Interpreting an event stream".
# So few tokens are computed within about one pass.
FEW_TOKENS: Final = 64
_PING: Final = b":\r\n "


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class ResponseProgress:
    """Counted by the relay; read for `/slots`, for liveness and for the backlog of an instance.

    Attributes:
        is_awaiting_upstream: Whether the next bytes are the instance's to send; else the client has
            yet to take what was sent.
        bytes_received: Of the body, without pings.
        prompt_done: Prompt tokens computed or cached.
        prompt_step: Prompt tokens computed in the latest pass; in several if their reports arrived
            together.
        prompt_total: An estimate until the instance reports progress.
        prompt_max: The most that it may be.
        is_reported: Whether the instance reported the figures of the prompt.
        chunked: Prompt tokens that earlier requests computed for this one, which are no cache.
        decoded: Events of generated text.
    """

    __slots__ = (
        "_clock",
        "_on_first_token",
        "bytes_received",
        "cached",
        "chunked",
        "decoded",
        "first_token_at_s",
        "has_header",
        "is_awaiting_upstream",
        "is_reported",
        "prompt_done",
        "prompt_max",
        "prompt_step",
        "prompt_total",
    )

    def __init__(self, clock: Clock, on_first_token: Callable[[], None] | None = None) -> None:
        self.has_header = False
        self.is_awaiting_upstream = True
        self.is_reported = False
        self.bytes_received = 0
        self.prompt_done = 0
        self.prompt_step = 0
        self.prompt_total = 0
        self.prompt_max = sys.maxsize
        self.cached = 0
        self.chunked = 0
        self.decoded = 0
        self.first_token_at_s: float | None = None
        self._clock = clock
        self._on_first_token = on_first_token

    def receive(self, chunk: bytes) -> None:
        """Count bytes that the client has yet to take."""
        self.is_awaiting_upstream = False
        if chunk.strip(_PING):
            self.bytes_received += len(chunk)

    def receive_token(self, chunk: bytes) -> None:
        self.receive(chunk)
        self.count_token()

    def count_token(self) -> None:
        self.decoded += 1
        if self.first_token_at_s is None:
            self.first_token_at_s = self._clock()
            if self._on_first_token:
                self._on_first_token()

    def set_prompt(self, done: int, total: int, cached: int) -> None:
        """Take the progress that the instance reports, in tokens; cached tokens count as done.

        Source: llama-server, build 10434: `return_progress` reports after each pass.

        Raises:
            ContextTooLong: The prompt has more than `prompt_max`, which was only estimated before.
        """
        if total > self.prompt_max:
            raise ContextTooLong(
                f"prompt is too long: {total} tokens > {self.prompt_max} maximum (max_context of "
                "its API key)"
            )
        self.prompt_step = max(0, done - max(self.prompt_done, cached))
        self.prompt_done, self.prompt_total = done, total
        self.cached = cached - min(self.chunked, cached)
        self.is_reported = True

    def remaining_tokens(self, expected_cached: int) -> int:
        if self.decoded:
            return 0
        return max(0, self.prompt_total - max(self.prompt_done, expected_cached))


class ProcessExit(Enum):
    """How the process of an instance ended."""

    CRASHED = "crashed"  # by a signal that was not ours, and a request may be to blame
    KILLED = "killed"  # by SIGKILL from outside: no request is to blame
    STOPPED = "stopped"  # on purpose, as to unload its model
    FAILED = "failed"  # in another way


@dataclass(frozen=True, slots=True)
class Activity:
    """An instance's requests.

    Attributes:
        awaiting_upstream: Those whose next bytes are the instance's to send; for the others, a
            client has yet to take what was sent.
        bytes_received: Of responses, without pings; never less while it is in service or holds one.
        is_silent: It does not answer `/health`.
    """

    in_flight: int = 0
    awaiting_upstream: int = 0
    bytes_received: int = 0
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """An instance at one moment.

    Attributes:
        conversations: Latest conversations that it owns.
        prefill_tps: 0 before its first answer, as `decode_tps`.
        acceptance: Share of drafted tokens that are accepted, 0 to 1; None before any.
    """

    upstream: Upstream
    in_service: bool
    conversations: int
    prefill_tps: float
    decode_tps: float
    leases: tuple[LeaseStats, ...]
    acceptance: float | None = None
    weight: Weight = EQUAL


@dataclass(slots=True, eq=False)
class RoutingTarget:
    """An instance, its requests, and its slots in use.

    A slot may be in use longer than its request lasts (the engine has yet to stop), or shorter (the
    client has yet to take the end of the response).

    Attributes:
        is_silent: It does not respond and gets no request that another can take.
        turn: Its place in the order of use; what has a larger weight comes more often.
        bit: Its place in sets of instances: a number of one bit, as of `PrefixIndex`.
        changed: Gets it where its leases, its turn or its rates have changed.
        bytes_received: Of responses to requests that are over.
        finished: Its latest requests, as estimates learn from them.
        chunk_turn: Held for a chunk of a prompt, and for the pause after it.
        slot_order: Held to read by requests that name a slot of known number while it is made
            ready, and to write by those that depend on the order in which the engine takes slots.
        owner_turn: Held while the requests of one owner of caches make room for another's.
    """

    upstream: Upstream
    rates: Rates
    in_service: bool = True
    is_silent: bool = False
    turn: float = 0.0
    bit: int = 0
    changed: set[RoutingTarget] = field(default_factory=set)
    bytes_received: int = 0
    in_flight: InFlight[Lease] = field(default_factory=InFlight)
    leases: list[Lease] = field(default_factory=list)
    finished: FinishedRequests = field(default_factory=FinishedRequests)
    chunk_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    slot_order: RWLock = field(default_factory=lambda: RWLock(fast=True))
    owner_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _placed: asyncio.Event | None = field(default=None, init=False)

    @property
    def activity(self) -> Activity:
        responses = [lease.progress for lease in self.in_flight]
        return Activity(
            len(responses),
            sum(response.is_awaiting_upstream for response in responses),
            self.bytes_received + sum(response.bytes_received for response in responses),
            self.is_silent,
        )

    def note_placed(self) -> None:
        """Note that a request has its slot in the engine, or has left it."""
        if self._placed:
            self._placed.set()
            self._placed = None

    async def wait_placed(self) -> None:
        """Wait until a request has its slot, or has left. Its own limits end the wait."""
        self._placed = self._placed or asyncio.Event()
        await self._placed.wait()

    @property
    def has_free_slot(self) -> bool:
        return len(self.leases) < self.upstream.slots

    def hold(self, leases: Sequence[Lease]) -> None:
        """Note that slots are in use."""
        self.leases += leases
        self.changed.add(self)

    def drop(self, lease: Lease) -> None:
        """Note that a slot is free."""
        self.leases.remove(lease)
        self.changed.add(self)

    def set_turn(self, turn: float) -> None:
        self.turn = turn
        self.changed.add(self)

    def set_rates(self, rates: Rates) -> None:
        self.rates = rates
        self.changed.add(self)

    def can_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here, and as many slots are free as it uses."""
        return self.may_take(request) and self.free >= self.needed(request)

    @property
    def free(self) -> int:
        """Free slots."""
        return self.upstream.slots - len(self.leases)

    @property
    def is_spare(self) -> bool:
        """Whether it takes only requests that find no free slot elsewhere."""
        return self.upstream.node is not None and self.upstream.node.is_spare

    def needed(self, request: ProxyRequest) -> int:
        """Return how many slots a request uses here."""
        return min(request.slots, self.upstream.slots)

    def may_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here.

        One that was forwarded stays on this machine, and one for a variant that this machine does
        not have goes to a node that has it.
        """
        node = self.upstream.node
        if request.remote_variant and (node is None or request.remote_variant not in node.variants):
            return False
        if node and request.adapter and MARK + request.adapter not in node.variants:
            return False
        return not (request.is_from_proxy and node)

    @property
    def ending(self) -> list[Lease]:
        """Slots in use whose requests are over, the oldest first."""
        return [lease for lease in self.leases if lease.is_ending]

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that it still has to compute."""
        return sum(lease.backlog_tokens for lease in self.leases)

    @property
    def work(self) -> InstanceWork:
        return InstanceWork(
            prefilling=sum(lease.is_prefilling for lease in self.leases),
            decoding=sum(lease.is_decoding for lease in self.leases),
        )

    def speed(self, *, is_measured: bool) -> Speed:
        node = self.upstream.node
        weight = node.weight if node else None
        return Speed(self.rates.latency, weight) if is_measured else Speed(weight=weight)

    def stats(self, conversations: int, weight: Weight) -> InstanceStats:
        known = bool(self.rates.answers)
        return InstanceStats(
            self.upstream,
            self.in_service,
            conversations,
            self.rates.prefill_tps if known else 0.0,
            self.rates.decode_tps if known else 0.0,
            tuple(lease.stats() for lease in self.leases),
            self.rates.acceptance,
            weight,
        )


# The connection breaks milliseconds before the process has ended, and up to half a second before
# the last of its output is read. Two attempts must end before a stream's first comment: after that
# an error cannot be a status any more.
_EXIT_WAIT_S: Final = 0.75
# With these the process lives, or was stopped by us.
_NO_EXIT: Final = (UpstreamLoading, UpstreamSilent, UpstreamShutDown, UpstreamUnavailable)


@dataclass(frozen=True, slots=True)
class Completion:
    """What a complete response reports; None for what it does not.

    Attributes:
        reply: The assistant's message in the format of OpenAI's chat API, which identifies the next
            turn of the conversation.
        all_choices: `timings` of all answers to the prompt together.
    """

    timings: Timings | None = None
    reply: Mapping[str, Any] | None = None
    all_choices: Timings | None = None


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """A slot in use.

    Attributes:
        phase: `ending`: the request is over and the engine has not yet confirmed an idle slot.
        prompt_done: Prompt tokens computed or cached.
        prompt_step: Prompt tokens of it in the latest pass.
        prompt_total: An estimate until the instance reports progress.
        decoded: Events of generated text.
        first_token_at_s: Monotonic, as `began_at_s`.
        id_slot: The engine's number of the slot; None: the engine chose it and has not told.
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
    id_slot: int | None = None
    prompt_step: int = 0


def by_slot(leases: Sequence[LeaseStats], count: int) -> dict[int, LeaseStats | None]:
    """Return the slots of an instance by number, each with its lease.

    A lease whose slot is not known gets the first number that no other has. `count` is that of all
    slots; there are more where slots of a withdrawn process are still in use.
    """
    placed: dict[int, LeaseStats | None] = {}
    others: list[LeaseStats] = []
    for lease in leases:
        if lease.id_slot is None or lease.id_slot in placed:
            others.append(lease)
        else:
            placed[lease.id_slot] = lease
    free = (number for number in range(count + len(leases)) if number not in placed)
    placed |= dict(zip(free, others, strict=False))
    return {number: placed.get(number) for number in sorted({*range(count), *placed})}


class Lease(InFlightRequest):
    """Made by `Router.lease`; in flight for the length of its block.

    Attributes:
        progress: Of the response; the relay counts in it.
        sequences: Slots of the instance in use when it began, its own among them.
        expected_cached: Prompt tokens that the instance's cache is believed to hold.
        position: In the queue when it joined, from 1; 0 if it did not wait.
        slot: The slot that it uses, where the slots of the instance are tracked.
        id_slot: The slot that the request names, or None: the engine chooses.
        owners: Of the process that it is sent to; None before it is.
        is_cache_off: Whether the engine may reuse nothing, because it could be another owner's.
        is_continued: Whether a running process is known to have its conversation.
        has_awaited_owner: Whether it waited for the instance that has its conversation, although
            another had a slot free.
        is_beside_own: Whether another request used the slot that held its conversation.
        has_own_slot: Whether its slot held its conversation; None where that is not known.
        restored: The file from which its slot was filled, or None.
        restore_s: For which that took.
        restored_tokens: Of its prompt, in its slot since that was filled from a file, now or as the
            process began. If it names the slot, its response shows whether the engine uses them.
        tier: Where its prompt was found; None before its response has ended, and on a node.
        finding: What was found of its prompt in the cache; None before its response has ended.
        chunked: Sums of the requests that computed parts of its prompt before it; None without.
        is_paused: Its slot is idle between two of those.
        reported: Sums of the complete responses to it.
        is_reported: Nothing was sent since the last of those.
        is_taken: Its slots are in use, and nobody was told yet what it took.
        unfinished: What its client has of a stream that broke off; None if it is not plain text.
        is_unsent: Whether the instance accepted no connection, so that it is not to blame for an
            exit.
        exit: How the instance's process ended; None while it runs.
        exit_reason: Why, for clients.
        beside: Leases of the further slots of a request for several completions.
        is_ending: The request is over and the engine may still use the slot.
        is_diverted: Its side of a trial had no slot free.
        is_overdue: Reported as still in use.
        crashed: Whether the instance's process crashed; None while it is not known to have exited.
        exit_reason: Why it exited, where clients should be told.
    """

    # More attributes than 30 would cost each lease a dictionary of its own.
    __slots__ = (
        "_exited",
        "_first",
        "began_at_s",
        "beside",
        "chunked",
        "clock",
        "conversation",
        "conversation_number",
        "ended_at_s",
        "exit",
        "exit_reason",
        "expected_cached",
        "finding",
        "has_awaited_owner",
        "has_own_slot",
        "id_slot",
        "instance",
        "is_beside_own",
        "is_cache_off",
        "is_continued",
        "is_diverted",
        "is_ending",
        "is_overdue",
        "is_paused",
        "is_reported",
        "is_taken",
        "is_unsent",
        "owners",
        "position",
        "progress",
        "queued_s",
        "reported",
        "request",
        "restore_s",
        "restored",
        "restored_tokens",
        "sequences",
        "slot",
        "tier",
        "unfinished",
        "upstream",
    )

    def __init__(
        self,
        request: ProxyRequest,
        instance: RoutingTarget,
        clock: Clock,
        first: Lease | None = None,
        on_first_token: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(instance.in_flight)
        self.request = request
        self.instance = instance
        self.upstream = instance.upstream
        self.clock = clock
        self.began_at_s = clock()
        self.progress = ResponseProgress(clock, on_first_token)
        if request.max_context:
            self.progress.prompt_max = request.max_context
        self.sequences = 1
        self.expected_cached = 0
        self.queued_s = 0.0
        self.position = 0
        self.conversation: object | None = None
        self.conversation_number: int | None = None
        self.is_diverted = False
        self.slot: TrackedSlot | None = None
        self.id_slot: int | None = None
        self.owners: SlotOwners | None = None
        self.is_cache_off = False
        self.is_continued = False
        self.is_beside_own = False
        self.has_awaited_owner = False
        self.has_own_slot: bool | None = None
        self.restored: SavedPrompt | None = None
        self.restore_s = 0.0
        self.restored_tokens = 0
        self.tier: Tier | None = None
        self.finding: CacheFinding | None = None
        self.chunked: Timings | None = None
        self.is_paused = False
        self.reported: Timings | None = None
        self.is_reported = True
        self.is_taken = request.kind.takes_slot and first is None
        self.beside: tuple[Lease, ...] = ()
        self.is_ending = False
        self.ended_at_s = 0.0
        self.is_overdue = False
        self.unfinished: Unfinished | None = None
        self.is_unsent = False
        self.exit: ProcessExit | None = None
        self.exit_reason = ""
        self._exited: asyncio.Event | None = None  # few leases wait for it
        self._first = first
        # The completions of one prompt share its prefill.
        if request.prompt and first is None:
            self.progress.prompt_total = request.prompt.tokens

    @property
    def slots(self) -> tuple[Lease, ...]:
        return (self, *self.beside)

    @property
    def slot_number(self) -> int | None:
        """The engine's `id_slot` of its slot; None where only the engine knows it."""
        if self.id_slot is not None:
            return self.id_slot
        return self.slot.id_slot if self.slot and self.slot.is_confirmed else None

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that the instance still has to compute."""
        return 0 if self.is_ending else self.progress.remaining_tokens(self.expected_cached)

    @property
    def is_prefilling(self) -> bool:
        """Whether the engine has yet to compute more than a few tokens of its prompt."""
        return self.progress.first_token_at_s is None and self.backlog_tokens > FEW_TOKENS

    @property
    def is_decoding(self) -> bool:
        """Whether its first token has arrived."""
        return not self.is_ending and (self._first or self).progress.decoded > 0

    def add_chunk(self, timings: Timings, slot: int, total: int) -> None:
        """Note that a request computed one more part of a prompt of `total` tokens, in a slot."""
        self.chunked = timings.added_to(self.chunked)
        self.id_slot = slot
        done = timings.cached_tokens + timings.prompt_tokens
        self.progress.chunked = self.chunked.prompt_tokens
        self.progress.set_prompt(done, total, done)
        self.is_reported = False

    def note_header(self) -> None:
        """Note that the response has begun: the engine has given the request its slot."""
        self.progress.has_header = True
        if self.owners:
            self.owners.note_placed(self)
            self.instance.note_placed()

    def note_released(self) -> None:
        """Note that the engine computes nothing more for it."""
        if self.owners:
            self.owners.note_release(self)
            self.instance.note_placed()

    def note_sent(self) -> None:
        """Note that the request is sent now."""
        self.is_reported = False

    def report(self, timings: Timings | None) -> None:
        """Note what a complete response reports, of all its choices."""
        if timings:
            self.reported = timings.added_to(self.reported) if self.reported else timings
            self.is_reported = True

    def end(self) -> None:
        self.is_ending = True
        self.ended_at_s = self.clock()

    def set_process_exit(self, process_exit: ProcessExit, reason: str = "") -> None:
        """Note how the instance's process exited; only the first call counts."""
        if self.exit is None:
            self.exit, self.exit_reason = process_exit, reason
            if self._exited:
                self._exited.set()

    async def wait_exit(self, error: UpstreamFailed) -> ProcessExit | None:
        """Return which exit caused this error; waits for the process to exit.

        None if the process goes on, and if it never received the request.
        """
        if isinstance(error, _NO_EXIT) or not self.upstream.reports_exit:
            return None
        # A process that died a moment ago is still routed to: its exit is awaited before a retry.
        self.is_unsent = isinstance(error, UpstreamUnconnected)
        if self.exit is None:
            self._exited = self._exited or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_WAIT_S):
                    await self._exited.wait()
        return None if self.is_unsent else self.exit

    def stats(self) -> LeaseStats:
        has_text = (self._first or self).progress.decoded > 0
        progress = self.progress
        return LeaseStats(
            request_id=self.request.request_id,
            client=self.request.client,
            phase="ending" if self.is_ending else "decode" if has_text else "prefill",
            prompt_done=progress.prompt_total if progress.decoded else progress.prompt_done,
            prompt_total=progress.prompt_total,
            cached=progress.cached,
            decoded=progress.decoded,
            began_at_s=self.began_at_s,
            first_token_at_s=progress.first_token_at_s,
            id_slot=self.slot_number,
            prompt_step=progress.prompt_step,
        )


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """Requests of one instance.

    Attributes:
        prefilling: Those of whose prompts it still has to compute more than a few tokens.
        decoding: Those whose first token has arrived.
    """

    prefilling: int
    decoding: int
