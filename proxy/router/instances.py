"""The instances that the proxy was told of, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from proxy.router.in_flight import InFlight
from proxy.upstream.timings import Rates
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from proxy.request import ProxyRequest
    from proxy.router.lease import Lease, LeaseStats


@dataclass(frozen=True, slots=True)
class Activity:
    """What an instance does for us at one moment.

    Attributes:
        in_flight: Requests it holds.
        awaiting_upstream: Those of them whose next bytes are the instance's to send; for the
            others, a client has yet to take what was sent.
        bytes_received: Bytes of answers that came from it so far, pings not counted; never less
            while it is admitted or holds a request.
        is_silent: Whether it does not answer `/health`.
    """

    in_flight: int = 0
    awaiting_upstream: int = 0
    bytes_received: int = 0
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """What is known of an instance at one moment.

    Attributes:
        upstream: The instance.
        in_service: Whether it may be given requests.
        conversations: Conversations it is home to, of the latest ones.
        prefill_tps: Tokens of prompts it computes each second; 0 before its first answer.
        decode_tps: Tokens it generates each second for a request; 0 before its first answer.
        leases: Its slots that are in use.
        acceptance: Share of the tokens it guesses ahead that come true, 0 to 1; None before any.
    """

    upstream: Upstream
    in_service: bool
    conversations: int
    prefill_tps: float
    decode_tps: float
    leases: tuple[LeaseStats, ...]
    acceptance: float | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """An instance, the requests it holds, and its slots in use.

    A slot may be in use longer than its request lasts (the engine has yet to stop), or shorter
    (the client has yet to take the end of the answer).

    Attributes:
        upstream: The instance.
        rates: How fast it is.
        in_service: Whether it may be given requests.
        is_silent: Whether it does not answer; it is then given none that another can take.
        last_used: When it was last given one, in the count of `Instances`.
        bytes_received: Bytes of answers to requests that are over.
        in_flight: The requests it holds.
        leases: Its slots in use, at most as many as it has.
    """

    upstream: Upstream
    rates: Rates
    in_service: bool = True
    is_silent: bool = False
    last_used: int = 0
    bytes_received: int = 0
    in_flight: InFlight[Lease] = field(default_factory=InFlight)
    leases: list[Lease] = field(default_factory=list)

    @property
    def activity(self) -> Activity:
        """Return what it does for us now."""
        responses = [lease.progress for lease in self.in_flight]
        return Activity(
            len(responses),
            sum(one.is_awaiting_upstream for one in responses),
            self.bytes_received + sum(one.bytes_received for one in responses),
            self.is_silent,
        )

    @property
    def has_free_slot(self) -> bool:
        """Return whether a slot is free."""
        return len(self.leases) < self.upstream.slots

    def can_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here, and as many slots are free as it uses."""
        return self.may_take(request) and self.free >= self.needed(request)

    @property
    def free(self) -> int:
        """Return how many slots are free."""
        return self.upstream.slots - len(self.leases)

    def needed(self, request: ProxyRequest) -> int:
        """Return how many slots a request uses here."""
        return min(request.slots, self.upstream.slots)

    def may_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here: one that was passed on stays on this machine."""
        return not (request.is_from_proxy and self.upstream.node)

    @property
    def ending(self) -> list[Lease]:
        """Return the slots in use whose requests are over, the oldest first."""
        return [lease for lease in self.leases if lease.is_ending]

    @property
    def backlog_tokens(self) -> int:
        """Return how many tokens of prompts it still has to compute."""
        return sum(lease.backlog_tokens for lease in self.leases)

    def stats(self, homes: int) -> InstanceStats:
        """Return what is known of it, with the number of its homes."""
        known = bool(self.rates.answers)
        return InstanceStats(
            self.upstream,
            self.in_service,
            homes,
            self.rates.prefill_tps if known else 0.0,
            self.rates.decode_tps if known else 0.0,
            tuple(lease.stats() for lease in self.leases),
            self.rates.acceptance,
        )


class Instances:
    """All instances by name: those admitted, and those that still hold something."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._rates: dict[str, Rates] = {}  # of those that are gone for now
        self._turn = count(1)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, name: str) -> Instance | None:
        """Return an instance, or None where there is none of the name."""
        return self._instances.get(name)

    def in_service(self, model: str) -> list[Instance]:
        """Return the instances of a model that may be given requests."""
        return [
            instance
            for instance in self
            if instance.in_service and instance.upstream.model == model
        ]

    def answering(self, model: str) -> list[Instance]:
        """Return those of them that are not silent; all of them where all are."""
        admitted = self.in_service(model)
        return [instance for instance in admitted if not instance.is_silent] or admitted

    def admit(self, upstream: Upstream) -> Instance:
        """Let an instance be given requests; facts of an earlier admission are replaced."""
        rates = self._rates.get(upstream.name, Rates())
        instance = self._instances.setdefault(upstream.name, Instance(upstream, rates))
        instance.upstream = upstream
        instance.in_service = True
        return instance

    def mark_used(self, instance: Instance) -> None:
        """Note that an instance is given a request."""
        instance.last_used = next(self._turn)

    def discard_if_unused(self, instance: Instance) -> None:
        """Forget an instance that is withdrawn and holds nothing; else do nothing."""
        if not (instance.in_service or instance.in_flight or instance.leases):
            self._rates[instance.upstream.name] = instance.rates
            self._instances.pop(instance.upstream.name, None)
