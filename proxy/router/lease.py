"""A lease: the right to use one slot of one instance for one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.errors import (
    Unfinished,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamUnavailable,
    UpstreamUnconnected,
)
from proxy.explanation.cache_finding import CacheFinding
from proxy.prompt_cache.slot_file_index import SavedPrompt
from proxy.prompt_cache.slot_map import TrackedSlot
from proxy.prompt_cache.slot_owners import SlotOwners
from proxy.request import ProxyRequest
from proxy.router.in_flight import InFlightRequest
from proxy.router.instances import Instance, ProcessExit
from proxy.router.prefill_admission import FEW_TOKENS
from proxy.router.response_progress import Clock, ResponseProgress
from proxy.slot_files.tiers import Tier
from proxy.upstream.timings import Timings

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
        instance: Instance,
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
            self.owners.placed(self)
            self.instance.note_placed()

    def note_released(self) -> None:
        """Note that the engine computes nothing more for it."""
        if self.owners:
            self.owners.released(self)
            self.instance.note_placed()

    def sent(self) -> None:
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
