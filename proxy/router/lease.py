"""Routing targets (instances as the router sees them), leases, and their use of slots.

A lease is the right to use one slot of one instance for one request.

An engine reports the tokens of complete responses. For a request that was cut off, it reports only
the progress until then, and computes to the end of the batch. The content of its idle slot shows
the total: the computed part of the prompt, and the answer without its last token.

Source: measured on build 10434. The engine's counters (`/metrics`) include tokens of requests that
were cut off, in prefill and in decoding.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Literal

from aiorwlock import RWLock

from proxy.cache.holders import Conversation, SavedPrompt
from proxy.cache.slot_map import Slot, SlotOwners
from proxy.errors import (
    ContextTooLong,
    ProxyError,
    Unfinished,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamUnavailable,
    UpstreamUnconnected,
)
from proxy.observe.cache_finding import CacheFinding, Tier
from proxy.observe.past import InternalWork
from proxy.observe.record import InFlight, InFlightRequest
from proxy.request.request import ProxyRequest
from proxy.request.variants import MARK
from proxy.upstream.upstream import DecodeLatency, Rates, Timings, Upstream, average

# A prompt of up to this many tokens takes about one pass.
FEW_TOKENS: Final = 64
# An engine's HTTP threads send `:` lines in an open stream whether or not it still computes.
# Source: llama-server --sse-ping-interval; WHATWG HTML, section "Interpreting an event stream".
_PING: Final = b":\r\n "

# Monotonic seconds.
Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class ResponseProgress:
    """The progress of one response; the relay counts it."""

    _clock: Clock
    _on_first_token: Callable[[], None] | None = None
    # Whether the instance has to send the next bytes; otherwise the client has not yet taken the
    # previous ones.
    is_awaiting_upstream: bool = True
    is_reported: bool = False  # Whether the instance has reported the prompt's figures.
    bytes_received: int = 0  # Bytes of the body, without pings.
    prompt_done: int = 0  # Prompt tokens computed or cached.
    # Prompt tokens computed in the latest pass; in several if their reports arrived together.
    prompt_step: int = 0
    prompt_total: int = 0  # Tokens of the prompt; an estimate until the instance reports progress.
    prompt_max: int = sys.maxsize  # The most tokens that the prompt may have.
    cached: int = 0
    # Prompt tokens that earlier requests computed for this one; they are not cache hits.
    chunked: int = 0
    decoded: int = 0  # Events of generated text.
    first_token_at_s: float | None = None
    # Called with the tokens of the prompt, and of these the cached ones, once they are known.
    _check_prompt: Callable[[int, int], None] | None = None

    def expect(self, check_prompt: Callable[[int, int], None]) -> None:
        """Have the prompt's figures checked; what the check raises ends the response."""
        self._check_prompt = check_prompt

    def receive(self, chunk: bytes) -> None:
        """Count bytes that arrived; the client has not taken them yet."""
        self.is_awaiting_upstream = False
        if chunk.strip(_PING):
            self.bytes_received += len(chunk)

    def count_token(self) -> None:
        self.decoded += 1
        if self.first_token_at_s is None:
            self.first_token_at_s = self._clock()
            if self._on_first_token:
                self._on_first_token()

    def count_chunk(self, chunk: bytes) -> None:
        """Count a chunk after the first token; chunks are taken for tokens."""
        self.decoded += 1
        if chunk and (chunk[0] not in _PING or chunk.strip(_PING)):
            self.bytes_received += len(chunk)

    def set_prompt(self, done: int, total: int, cached: int) -> None:
        """Set the progress that the instance reports, in tokens; cached tokens count as done.

        Source: llama-server, build 10434: `return_progress` reports after each pass.

        Raises:
            ContextTooLong: The prompt is longer than `prompt_max`; before, only an estimate fitted.
        """
        if total > self.prompt_max:
            raise ContextTooLong(
                f"prompt is too long: {total} tokens > {self.prompt_max} maximum (max_context of "
                "its API key)"
            )
        if self._check_prompt:
            self._check_prompt(total, cached)
        self.prompt_step = max(0, done - max(self.prompt_done, cached))
        self.prompt_done, self.prompt_total = done, total
        self.cached = cached - min(self.chunked, cached)
        self.is_reported = True

    def remaining_tokens(self, expected_cached: int) -> int:
        if self.decoded:
            return 0
        return max(0, self.prompt_total - max(self.prompt_done, expected_cached))


# How the process of an instance ended: crashed by a signal that was not ours, and a request may be
# to blame; killed by SIGKILL from outside, and no request is to blame; stopped on purpose, as to
# unload its model; failed in another way.
ProcessExit = Literal["crashed", "killed", "stopped", "failed"]


WeightReason = Literal["measured", "set", "equal"]


@dataclass(frozen=True, slots=True)
class Weight:
    """An instance's share of requests as a multiple of an average one."""

    value: float = 1.0
    # `measured`, `set` in the settings, or `equal`: too few measurements, or too little difference.
    reason: WeightReason = "equal"


EQUAL: Final = Weight()


# An instance's measured latency, and its weight in the settings, or None.
Speed = tuple[DecodeLatency, float | None]


@dataclass(frozen=True, slots=True)
class Activity:
    """An instance's requests."""

    in_flight: int = 0
    # Requests for which the instance has to send the next bytes; clients of the others have not yet
    # taken the previous ones.
    awaiting_upstream: int = 0
    # Bytes of responses, without pings; does not decrease while the instance is in service or holds
    # a request.
    bytes_received: int = 0
    is_silent: bool = False  # It does not answer `/health`.


@dataclass(frozen=True, slots=True)
class InstanceStats:
    upstream: Upstream
    in_service: bool
    conversations: int  # How many of the latest conversations it owns.
    prefill_tps: float  # 0 before its first answer, like `decode_tps`.
    decode_tps: float
    leases: tuple[LeaseStats, ...]
    # Share of drafted tokens that were accepted, 0 to 1; None before any.
    acceptance: float | None = None
    weight: Weight = EQUAL
    # Slots that are held for a next turn while a request waits: seconds left, by number.
    held: Mapping[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RoutingTarget:
    """An instance as the router sees it: its address, its requests, and its slots in use.

    A slot may be in use after its request is over (the engine has not stopped yet), or free before
    (the client has not taken the end of the response yet).
    """

    upstream: Upstream
    rates: Rates
    in_service: bool = True
    # It does not respond, and gets only requests that no other instance can take.
    is_silent: bool = False
    # Its place in the order of use; the router advances it less for a larger weight.
    turn: float = 0.0
    bit: int = 0  # Its bit in sets of instances, as assigned by `PrefixIndex`.
    # Shared set of changed instances; this one adds itself when its leases, turn or rates change.
    changed: set[RoutingTarget] = field(default_factory=set)
    bytes_received: int = 0  # Bytes of responses to requests that are over.
    in_flight: InFlight[Lease] = field(default_factory=InFlight)
    leases: list[Lease] = field(default_factory=list)
    # Held for a chunk of a prompt, and for the pause after it.
    chunk_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Read lock: held while a slot of known number is prepared. Write lock: held by requests that
    # depend on the order in which the engine takes slots.
    slot_order: RWLock = field(default_factory=lambda: RWLock(fast=True))
    # Held while requests of one cache owner make room for another's.
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
        """Note that the engine gave a request its slot, or that a request ended."""
        if self._placed:
            self._placed.set()
            self._placed = None

    async def wait_placed(self) -> None:
        """Wait for the next `note_placed`. The limits of the waiting request bound the wait."""
        self._placed = self._placed or asyncio.Event()
        await self._placed.wait()

    @property
    def has_free_slot(self) -> bool:
        return len(self.leases) < self.upstream.slots

    def hold(self, leases: Sequence[Lease]) -> None:
        self.leases += leases
        self.changed.add(self)

    def drop(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.changed.add(self)

    def set_turn(self, turn: float) -> None:
        self.turn = turn
        self.changed.add(self)

    def set_rates(self, rates: Rates) -> None:
        self.rates = rates
        self.changed.add(self)

    def can_take(self, request: ProxyRequest) -> bool:
        slots = self.upstream.slots
        return slots - len(self.leases) >= min(request.slots, slots) and self.may_take(request)

    @property
    def free(self) -> int:
        return self.upstream.slots - len(self.leases)

    @property
    def is_spare(self) -> bool:
        return self.upstream.node is not None and self.upstream.node.is_spare

    def slots_needed(self, request: ProxyRequest) -> int:
        return min(request.slots, self.upstream.slots)

    def may_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here.

        A request that another proxy forwarded stays on this machine. A request for a variant that
        this machine does not have goes to a node that has it.
        """
        node = self.upstream.node
        if request.remote_variant and (node is None or request.remote_variant not in node.variants):
            return False
        if node and request.adapter and MARK + request.adapter not in node.variants:
            return False
        return not (request.is_from_proxy and node)

    @property
    def ending(self) -> list[Lease]:
        """Leases of slots that are in use although their requests are over, oldest first."""
        return [lease for lease in self.leases if lease.is_ending]

    @property
    def backlog_tokens(self) -> int:
        return sum(lease.backlog_tokens for lease in self.leases)

    @property
    def prefilling(self) -> int:
        return sum(lease.is_prefilling for lease in self.leases)

    @property
    def decoding(self) -> int:
        return sum(lease.is_decoding for lease in self.leases)

    def stats(self, conversations: int, weight: Weight, held: Mapping[int, float]) -> InstanceStats:
        rates, leases = self.rates, tuple(lease.stats() for lease in self.leases)
        speeds = (rates.prefill_tps, rates.decode_tps) if rates.answers else (0.0, 0.0)
        known = self.upstream, self.in_service, conversations, *speeds
        return InstanceStats(*known, leases, rates.acceptance, weight, held)


# The connection breaks milliseconds before the process ends, and up to half a second before its
# last output is read. Two attempts must end before a stream's first ping: after that, an error
# cannot be a status any more.
_EXIT_WAIT_S: Final = 0.75
# After these errors the process still runs, or we stopped it.
_NO_EXIT: Final = (UpstreamLoading, UpstreamSilent, UpstreamShutDown, UpstreamUnavailable)


@dataclass(frozen=True, slots=True)
class Completion:
    """The report of a complete response; members that it lacks are None."""

    timings: Timings | None = None
    # The assistant's message in the format of OpenAI's chat API; it identifies the conversation's
    # next turn.
    reply: Mapping[str, Any] | None = None
    all_choices: Timings | None = None  # `timings` summed over all answers to the prompt.


@dataclass(frozen=True, slots=True)
class LeaseStats:
    request_id: str
    client: str
    # `ending`: the request is over and the engine has not yet confirmed an idle slot.
    phase: Literal["prefill", "decode", "ending"]
    prompt_done: int  # Prompt tokens computed or cached.
    prompt_total: int  # Tokens of the prompt; an estimate until the instance reports progress.
    cached: int
    decoded: int  # Events of generated text.
    began_at_s: float
    first_token_at_s: float | None  # Monotonic, like `began_at_s`.
    # The engine's number of the slot; None: the engine chose it and did not report it.
    id_slot: int | None = None
    prompt_step: int = 0  # Prompt tokens computed in the latest pass.


def by_slot(leases: Sequence[LeaseStats], count: int) -> dict[int, LeaseStats | None]:
    """Return the slots of an instance by number, each with its lease.

    Leases of unknown slots get the first numbers that are left. The result has more than the
    `count` slots of the instance if slots of a withdrawn process are still in use.
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


@dataclass(slots=True, eq=False)
class Lease(InFlightRequest):
    """Made by `Router.lease`; in flight for the length of its block.

    Its phases: granted (it counts as a slot of the instance, which slot is open); slot chosen
    (`slot`, `id_slot`; saves and restores of that slot come here); sent (`owners` is set); prefill,
    then decode (`progress`); ended (`Router.finish`: queue, index and slots learn from the
    response); `is_ending`, if the engine may still use the slot; released. A retry begins again
    with a lease of its own.
    """

    request: ProxyRequest
    instance: RoutingTarget
    clock: Clock
    first: Lease | None = None  # Of such a slot: the lease of the first one.
    on_first_token: InitVar[Callable[[], None] | None] = None
    upstream: Upstream = field(init=False)
    began_at_s: float = field(init=False)
    ended_at_s: float = 0.0
    # The progress of the response; the relay counts it.
    progress: ResponseProgress = field(init=False)
    sequences: int = 1  # Slots of the instance in use when the lease began, its own included.
    expected_cached: int = 0  # Prompt tokens expected in the instance's cache.
    queued_s: float = 0.0
    position: int = 0  # Place in the queue when it joined, from 1; 0 if it did not wait.
    conversation: Conversation | None = None
    conversation_number: int | None = None
    # The tracked slot that it uses; None if the instance's slots are not tracked.
    slot: Slot | None = None
    id_slot: int | None = None  # The slot that the request names; None: the engine chooses.
    # Cache owners of the engine's process; None until the request is sent.
    owners: SlotOwners | None = None
    is_placed: bool = False  # Its response has begun: the engine has given it its slot.
    # The engine must reuse nothing, because that could be another owner's.
    is_cache_off: bool = False
    is_continued: bool = False  # A running process is known to have its conversation.
    # The process that has its conversation: empty for this one, None if unknown or the instance's.
    holder: str | None = None
    # It waited for the instance that has its conversation, although another had a slot free.
    has_awaited_owner: bool = False
    is_beside_own: bool = False  # Another request used the slot that held its conversation.
    has_own_slot: bool | None = None  # Whether its slot held its conversation; None if unknown.
    restored: SavedPrompt | None = None  # The file from which its slot was filled, or None.
    restore_s: float = 0.0  # The duration of that restore.
    saved_s: float = 0.0  # Estimated time to compute the tokens found, minus that of the restore.
    # For how long it waited for the list of the engine's slots before it was sent.
    slots_s: float = 0.0
    # Prompt tokens in its slot from a file restored now or when the process began. If the request
    # names the slot, its response shows whether the engine uses them.
    restored_tokens: int = 0
    # The place in which its prompt was found; None until its response ends, and on a node.
    tier: Tier | None = None
    # The result of the prompt's cache lookup; None until its response ends.
    finding: CacheFinding | None = None
    # Sum of the requests that computed parts of its prompt before it; None without any.
    chunked: Timings | None = None
    is_paused: bool = False  # Its slot is idle between two of those requests.
    # Blocks of its prompt that it computes first and saves for other instances; 0: none.
    beginning_blocks: int = 0
    beginning_saved_at_s: float | None = None  # When the engine had written them to a file.
    # For how long it waited for another request that computed its beginning.
    beginning_wait_s: float = 0.0
    held_s: float = 0.0  # For how long its slot was held for it while other requests waited.
    hold_wait_s: float = 0.0  # For how long it waited although a slot was free: it was held.
    reported: Timings | None = None  # Sum of the complete responses to it.
    is_reported: bool = True  # Nothing was sent since the last of those responses.
    is_taken: bool = field(init=False)  # Its slots are in use, and their use was not reported yet.
    # The part of a broken stream that its client has; None if it is not plain text.
    unfinished: Unfinished | None = None
    # Its tag and number in the queue; None if it does not yield its slot.
    place: tuple[float, int] | None = None
    yielded: SlotYielded | None = None  # How it yielded its last slot.
    # Stops the response if it can be continued, and returns the answer so far.
    _stop: Callable[[], Unfinished | None] | None = None
    # The instance accepted no connection, so the request cannot have caused its exit.
    is_unsent: bool = False
    exit: ProcessExit | None = None  # How the instance's process ended; None while it runs.
    exit_reason: str = ""  # Why it ended, for clients; empty if they are not to be told.
    # Leases of the further slots of a request for several completions.
    beside: tuple[Lease, ...] = ()
    is_ending: bool = False  # The request is over, but the engine may still use the slot.
    is_diverted: bool = False  # Its side of a trial had no free slot.
    is_overdue: bool = False  # It was reported as still in use.
    _exited: asyncio.Event | None = None  # few leases wait for it

    def __post_init__(self, on_first_token: Callable[[], None] | None) -> None:
        InFlightRequest.__init__(self, self.instance.in_flight)  # `super()` is another class here
        self.upstream = self.instance.upstream
        self.began_at_s = self.clock()
        self.progress = ResponseProgress(self.clock, on_first_token)
        if self.request.max_context:
            self.progress.prompt_max = self.request.max_context
        self.is_taken = self.request.kind.takes_slot and self.first is None
        # The completions of one prompt share its prefill.
        if self.request.prompt and self.first is None:
            self.progress.prompt_total = self.request.prompt.tokens

    @property
    def slots(self) -> tuple[Lease, ...]:
        return (self, *self.beside)

    @property
    def beginning(self) -> int:
        """The hash of the beginning that it may compute for others; 0 without a prompt."""
        prompt, of_all = self.request.prompt, self.request.is_branch
        return prompt.shared_hashes[0 if of_all else -1] if prompt else 0

    @property
    def reported_tokens(self) -> Tokens:
        found = self.reported
        if found is None:
            return Tokens()
        return Tokens(found.prompt_tokens, found.cached_tokens, found.decoded_tokens)

    @property
    def slot_number(self) -> int | None:
        """The engine's number of its slot; None if only the engine knows it."""
        if self.id_slot is not None:
            return self.id_slot
        return self.slot.id_slot if self.slot and self.slot.is_confirmed else None

    @property
    def backlog_tokens(self) -> int:
        return 0 if self.is_ending else self.progress.remaining_tokens(self.expected_cached)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than `FEW_TOKENS` prompt tokens are left to compute."""
        return self.progress.first_token_at_s is None and self.backlog_tokens > FEW_TOKENS

    @property
    def is_decoding(self) -> bool:
        return not self.is_ending and (self.first or self).progress.decoded > 0

    def add_chunk(self, timings: Timings, slot: int, total: int) -> None:
        """Note that a request computed part of the prompt, which has `total` tokens, in a slot."""
        self.chunked = timings.plus(self.chunked)
        self.id_slot = slot
        done = timings.cached_tokens + timings.prompt_tokens
        self.progress.chunked = self.chunked.prompt_tokens
        self.progress.set_prompt(done, total, done)
        self.is_reported = False

    def note_header(self) -> None:
        self.is_placed = True
        self.instance.note_placed()

    @property
    def may_yield(self) -> bool:
        """Whether it may give up its slot, now or once its answer has begun."""
        return self._stop is not None and not self.is_ending and self.cut_by is None

    def let_yield(self, stop: Callable[[], Unfinished | None]) -> None:
        """Let the response be stopped, and continued later, while it waits for the instance."""
        self._stop = stop

    @property
    def ran_s(self) -> float:
        """How long it has held slots, those before it yielded included."""
        before_s = self.yielded.ran_s if self.yielded else 0.0
        return before_s + self.clock() - self.began_at_s

    @property
    def spent_s(self) -> float:
        """How much of that it has wasted by yielding: an estimate until it is measured."""
        if self.yielded is None:
            return 0.0
        last_s = self.handover_s
        return self.yielded.spent_s + (self.yielded.cost_s if last_s is None else last_s)

    @property
    def handover_s(self) -> float | None:
        """How long its last yield kept slots from decoding; None if not known, or not yet.

        Until the engine had stopped, to save what it had computed, and, with the slot in which it
        goes on, until its next token: to restore that and to compute the rest again. Of a prompt
        that was stopped, the time until its first token is no waste.
        """
        yielded, first_s = self.yielded, self.progress.first_token_at_s
        is_rest = self.place is not None  # an answer that is computed again does not yield
        if yielded is None or first_s is None or not (is_rest and yielded.unfinished.tokens):
            return None
        saved_s = self.conversation.paused_save_s if self.conversation else 0.0
        return yielded.stop_s + saved_s + first_s - self.began_at_s

    def yield_slot(self, cost_s: float) -> bool:
        """Give up the slot, and end the block with SlotYielded; False if that is impossible now.

        Call it from another task. `cost_s` is the time that is wasted.
        """
        if not (self._stop and self.may_yield and self.place):
            return False
        if not self.progress.is_awaiting_upstream or (unfinished := self._stop()) is None:
            return False
        self.cut(SlotYielded(self, self.place, unfinished, cost_s))
        return True

    def part_timings(self, tokens: int) -> Timings:
        """Return the timings of an answer so far, of this many tokens, by our own clock."""
        progress, now_s = self.progress, self.clock()
        first_s = now_s if progress.first_token_at_s is None else progress.first_token_at_s
        prompt_ms, decode_ms = 1000 * (first_s - self.began_at_s), 1000 * (now_s - first_s)
        done = progress.prompt_total if tokens else max(progress.prompt_done, progress.cached)
        computed = done - progress.cached
        return Timings(progress.cached, computed, prompt_ms, tokens, decode_ms)

    def report(self, timings: Timings | None) -> None:
        """Add the timings of a complete response, summed over its choices."""
        if timings:
            self.reported = timings.plus(self.reported) if self.reported else timings
            self.is_reported = True

    def set_process_exit(self, process_exit: ProcessExit, reason: str = "") -> None:
        """Set how the instance's process ended; only the first call counts."""
        if self.exit is None:
            self.exit, self.exit_reason = process_exit, reason
            if self._exited:
                self._exited.set()

    async def wait_exit(self, error: UpstreamFailed) -> ProcessExit | None:
        """Return the process exit that caused this error, after a short wait for it.

        None if the process still runs, or never received the request.
        """
        if isinstance(error, _NO_EXIT) or not self.upstream.reports_exit:
            return None
        # Requests still go to a process that died a moment ago: wait for its exit before a retry.
        self.is_unsent = isinstance(error, UpstreamUnconnected)
        if self.exit is None:
            self._exited = self._exited or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_WAIT_S):
                    await self._exited.wait()
        return None if self.is_unsent else self.exit

    def stats(self) -> LeaseStats:
        has_text = (self.first or self).progress.decoded > 0
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


class SlotYielded(ProxyError):
    """A request gave up its slot for one of higher priority; no client gets this error.

    Attributes:
        unfinished: The answer that this instance has sent so far; `NO_ANSWER` before its first
            token.
        place: The request's tag and number in the queue.
        timings: Of the unfinished answer.
        ran_s: How long the request has held slots.
        spent_s: How much of that it had wasted by yielding before.
        cost_s: How much it wastes now, as estimated.
        at_s: When it yielded.
        stop_s: How long the engine took to stop.
    """

    text = "the request gave up its slot"

    def __init__(
        self, lease: Lease, place: tuple[float, int], unfinished: Unfinished, cost_s: float
    ) -> None:
        super().__init__()
        self.unfinished = unfinished
        self.place = place
        self.timings = lease.part_timings(unfinished.tokens)
        self.ran_s = lease.ran_s
        self.spent_s = lease.spent_s
        self.cost_s = cost_s
        self.at_s = lease.clock()
        self.stop_s = 0.0

    def note_stopped(self, now_s: float) -> None:
        self.stop_s = now_s - self.at_s


# Assumed time for which a request holds a slot, before the first has finished.
_HELD_S: Final = 2.0


class LeaseTimes:
    """Averages over finished requests."""

    def __init__(self) -> None:
        self.held_s = _HELD_S  # Time from the lease of a slot to the end of the response.
        self.decode_s = 0.0  # The part of it from the first to the last token.

    def note(self, held_s: float, timings: Timings | None) -> None:
        self.held_s = average(self.held_s, held_s)
        if timings:
            self.decode_s = average(self.decode_s, timings.decode_ms / 1000)

    def wait_s(self, waiting: int, slots: int) -> float:
        return self.held_s * (waiting + 1) / max(1, slots)


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
    """One request on one instance, from its lease until its slots were idle."""

    client: str | InternalWork  # Otherwise the name of an API key, or an address.
    model: str
    instance: str
    tokens: Tokens
    slot_s: float  # Seconds, times the slots that it held.
    # Whether the engine reported the tokens; otherwise they are a lower bound.
    is_exact: bool = True
    # Whether they were read from the slot that is probably its own, or not at all.
    is_cut_off: bool = False


def slot_use(lease: Lease, slots: int, held: Iterable[int]) -> SlotUse:
    """Return the use of a request that is over.

    It held `slots` slots; `held` are the tokens in each idle slot of the engine, if it was cut off.
    """
    tokens, is_exact = lease.reported_tokens, not lease.request.is_background
    if not lease.is_reported:
        rest, is_exact = cut_off_tokens(lease.progress, held)
        tokens += rest
    slot_s = (lease.clock() - lease.began_at_s) * slots
    model, name, is_cut_off = lease.request.model, lease.upstream.name, not lease.is_reported
    return SlotUse(lease.request.client, model, name, tokens, slot_s, is_exact, is_cut_off)


def cut_off_tokens(progress: ResponseProgress, held: Iterable[int]) -> tuple[Tokens, bool]:
    """Return the tokens of a request that was cut off, and whether they are exact.

    `held` are the tokens in each idle slot of the engine, its own included if it began.
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
