"""Engines that crash, fall silent, or go on computing for requests that ended."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import orjson
from attrs import define, field
from xxhash import xxh3_128_digest

from proxy.common.toml_text import table_beside
from proxy.errors import (
    CrashesEngine,
    ProxyError,
    UpstreamConnectFailed,
    UpstreamSilent,
    UpstreamTimeout,
    UpstreamUnconnected,
)
from proxy.request.request import ProxyRequest
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.router.registry import Instances, InstanceTasks
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream

_REFUSED_FROM: Final = 2
_SUSPECTS_MAX: Final = 1024
_IGNORED_MEMBERS: Final = frozenset[str](table_beside(__file__)["ignored_members"])


class CrashSuspects:
    """Requests that engines were computing when they crashed.

    A request is recognised by path, model and body, without members that change between retries.
    It is unknown which of several requests caused a crash: all become suspects, and a request that
    completes is cleared. After a suspect's second crash it is refused. The latest 1024 are kept.

    Args:
        clock: Monotonic time.
        memory_s: How long a suspect is kept after its last crash, and refused after its second.
    """

    def __init__(self, clock: Clock, memory_s: float) -> None:
        self._clock = clock
        self._memory_s = memory_s
        self._suspects: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # crashes, last time

    def check(self, request: ProxyRequest) -> None:
        """Raise CrashesEngine if engines crashed twice while they computed a request."""
        if not self._suspects:  # hash nothing as long as no engine crashes
            return
        self._forget_old()
        crashes, at_s = self._suspects.get(fingerprint(request), (0, 0.0))
        if crashes >= _REFUSED_FROM:
            rest_s = math.ceil(at_s + self._memory_s - self._clock())
            raise CrashesEngine(
                f"{crashes} engines of {request.model} crashed while computing this "
                f"request; it is refused for {rest_s} s more: change it, or retry later"
            )

    def note_crash(self, requests: Iterable[ProxyRequest]) -> None:
        """Note that an engine crashed while it computed requests; equal ones count once."""
        for key in {fingerprint(request) for request in requests}:
            crashes, _ = self._suspects.pop(key, (0, 0.0))
            self._suspects[key] = crashes + 1, self._clock()
        while len(self._suspects) > _SUSPECTS_MAX:
            self._suspects.popitem(last=False)

    def clear(self, request: ProxyRequest) -> None:
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget_old(self) -> None:
        while self._suspects:
            key, (_, at_s) = next(iter(self._suspects.items()))
            if self._clock() - at_s < self._memory_s:
                return
            del self._suspects[key]


def fingerprint(request: ProxyRequest) -> bytes:
    """Return the hash by which a suspect is recognised: 16 bytes."""
    members = {name: value for name, value in request.json.items() if name not in _IGNORED_MEMBERS}
    if request.form:  # its boundary differs each time
        content = request.body.replace(request.form.boundary.encode(), b"")
    else:
        try:
            content = orjson.dumps(members, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # JSON that can be read may be nested too deeply to be written
            content = request.body
    return xxh3_128_digest(f"{request.path}\0{request.model}\0".encode() + content)


FIRST_BYTE_S: Final = 1.0
_HEALTH_S: Final = 1.0
# If the query ends this late after its time limit, this process stood still, not the instance.
_LATE_S: Final = 0.25
_HEALTH_MAX_BYTES: Final = 64 * 1024

# Errors that show that no process listens any more.
_ENDED: Final = (ConnectionError, FileNotFoundError)

Responds = Callable[[Upstream], Awaitable[bool]]


@define(eq=False, slots=False)
class FirstByteMonitor:
    """Moves requests away from instances that send no first byte and do not respond.

    The kernel accepts connections for a stopped process, which sends nothing. An engine that
    computes a long prompt sends nothing either, but answers `/health` at once. So while a request
    waits for its first byte, its instance is queried. A silent instance gets no more requests as
    long as another responds, and its requests without a first byte move to free slots elsewhere. It
    is queried each second until it answers. Without another instance no query is sent, and no
    request moves to a busy instance.

    Source: `/health` of build 10434 answers in 0.2 ms while all slots are busy.

    Args:
        responds: Returns within a second whether an instance responds.
        changed: Called with the model of an instance that became silent, or responds again.
    """

    _instances: Instances
    _responds: Responds
    _changed: Callable[[str], None]
    _tasks: InstanceTasks
    # With the time of its check, the earliest first.
    _waiting: dict[Lease, float] = field(factory=dict, init=False)
    # One for all leases: a timer costs microseconds.
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def watch(self, lease: Lease) -> None:
        """Watch a request until `forget`; a node watches its own requests."""
        if not self._tasks.are_running or lease.upstream.node:
            return
        loop = asyncio.get_running_loop()
        self._waiting[lease] = loop.time() + FIRST_BYTE_S
        if self._timer is None:
            self._timer = loop.call_later(FIRST_BYTE_S, self._check_due)

    def forget(self, lease: Lease) -> None:
        self._waiting.pop(lease, None)

    def _check_due(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due = [lease for lease, due_at_s in self._waiting.items() if due_at_s <= now_s]
        for lease in due:
            del self._waiting[lease]
        first_at_s = next(iter(self._waiting.values()), None)
        self._timer = None
        if first_at_s is not None:
            self._timer = loop.call_at(first_at_s, self._check_due)
        for lease in due:
            if not lease.is_placed:
                self.watch(lease)
                if self._other_instances(lease.instance):
                    self._tasks.wake("first_byte", lease.instance, self._examine)

    async def _examine(self, instance: RoutingTarget, _: asyncio.Event) -> None:
        """Query an instance until it responds; it gets no requests meanwhile."""
        try:
            while await self._is_gone(instance) and instance.in_service:
                if not instance.is_silent:
                    self._instances.set_silent(instance, is_silent=True)
                    self._changed(instance.upstream.model)
                self._move(instance)
                await asyncio.sleep(FIRST_BYTE_S)
        finally:
            if instance.is_silent:
                self._instances.set_silent(instance, is_silent=False)
                self._changed(instance.upstream.model)

    async def _is_gone(self, instance: RoutingTarget) -> bool:
        loop = asyncio.get_running_loop()
        began_at_s = loop.time()
        responds = await self._responds(instance.upstream)
        is_late = loop.time() - began_at_s > _HEALTH_S + _LATE_S
        return not responds and (instance.is_silent or not is_late)

    def _move(self, instance: RoutingTarget) -> None:
        """Abort requests without a first byte for which another instance has a free slot."""
        others = self._other_instances(instance)
        free = sum(other.free for other in others)
        waiting = [lease for lease in self._waiting if not lease.is_placed]
        for lease in [lease for lease in waiting if lease.instance is instance]:
            needed = instance.slots_needed(lease.request) if lease.request.kind.takes_slot else 0
            if others and needed <= free:
                free -= needed
                self.forget(lease)
                reason = "sent no first byte and does not answer /health"
                lease.abort(UpstreamSilent(instance.upstream.name, reason))

    def _other_instances(self, instance: RoutingTarget) -> list[RoutingTarget]:
        admitted = self._instances.in_service(instance.upstream.model)
        return [other for other in admitted if other is not instance and not other.is_silent]


async def answers_health(upstream: Upstream, settings: ProxySettings) -> bool:
    """Query `/health`; any answer counts.

    A refused or broken connection also counts: it means that the process ended. Its requests notice
    that themselves, and a request that crashed it must not move to another instance.
    """
    try:
        await fetch(upstream, get_request("/health"), settings, _HEALTH_S, _HEALTH_MAX_BYTES)
    except UpstreamConnectFailed as error:
        is_closed = not isinstance(error, UpstreamUnconnected)
        return is_closed or isinstance(error.__cause__, _ENDED)
    except ProxyError:
        return False
    return True


# An engine stops after one or two tokens.
_FIRST_PAUSE_S: Final = 0.01
_LAST_PAUSE_S: Final = 2.0

# Reads an engine's `/slots`; None if it does not report them.
ListSlots = Callable[[Upstream], Awaitable[Sequence[SlotState] | None]]
# Frees the slot of a lease; also gets the tokens in the engine's idle slots.
Free = Callable[[Lease, Sequence[int]], None]


@define(eq=False, slots=False)
class SlotReleaser:
    """Frees the slots of requests that ended before their response did, once the slots are idle.

    After a client has left, an engine computes to the end of the batch, which may take seconds. If
    its slot were leased meanwhile, the next request would wait inside the engine. So the engine is
    asked for its busy slots: soon at first, then less and less often, because a query each second
    keeps an engine from noticing that other clients have left. If it does not report its slots,
    they are freed anyway.

    Source: `/slots` of builds 10434 and 11434, measured. A grammar of 500 000 alternatives keeps
    build 10434 busy for minutes after its client left.

    Args:
        list_slots: Reads an engine's slots.
        cancel_timeout_s: Above 0.
        overdue: Called once for each slot that is still in use after that time; it stays in use
            until it is idle or its instance is withdrawn.
    """

    _list_slots: ListSlots
    _clock: Clock
    _cancel_timeout_s: float
    _overdue: Callable[[Lease], None]
    _tasks: InstanceTasks

    def release_when_idle(self, lease: Lease, free: Free) -> None:
        """Free the slot of a request that is over, once the slot is idle.

        At once if no tasks run, and on another machine, whose own proxy counts its slots.
        """
        instance = lease.instance
        if not self._tasks.are_running or not instance.in_service or lease.upstream.node:
            free(lease, ())
            return
        lease.is_ending, lease.ended_at_s = True, self._clock()
        self._tasks.wake("slots", instance, partial(self._free_when_idle, free))

    async def _free_when_idle(
        self, free: Free, instance: RoutingTarget, ended: asyncio.Event
    ) -> None:
        """Free slots as they become idle; `ended` is set when another request ended."""
        pause_s = _FIRST_PAUSE_S
        while instance.ending:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await ended.wait()
            is_fresh = ended.is_set()  # its slot may be idle soon
            ended.clear()
            pause_s = _FIRST_PAUSE_S if is_fresh else min(2 * pause_s, _LAST_PAUSE_S)
            if not is_fresh:
                await self._free_idle(instance, free)

    async def _free_idle(self, instance: RoutingTarget, free: Free) -> None:
        busy, tokens = instance.upstream.slots, list[int]()
        with suppress(UpstreamTimeout):  # it is there, and busy with something
            slots = await self._list_slots(instance.upstream) or ()
            tokens = [slot.tokens for slot in slots if not slot.is_busy]
            busy = len(slots) - len(tokens)
        ending = instance.ending
        live = sum(not (lease.is_ending or lease.is_paused) for lease in instance.leases)
        still_busy = min(max(0, busy - live), len(ending))
        idle = ending[: len(ending) - still_busy]
        for lease in idle:
            free(lease, tokens)
        for lease in ending[len(idle) :]:
            is_late = self._clock() - lease.ended_at_s >= self._cancel_timeout_s
            if is_late and not lease.is_overdue and lease in instance.leases:
                lease.is_overdue = True
                self._overdue(lease)
