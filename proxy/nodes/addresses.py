"""The addresses that a name stands for: what becomes of them with each answer. Pure.

A removed record removes its address at once. No record at all counts when it is confirmed, and a
question without an answer changes nothing of what it is about.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

# Of one name, and of all names together.
ADDRESSES_MAX: Final = 1024
# Bounds of a TTL: dnsmasq has 0 for its own records, others have days.
_TTL_MIN_S: Final = 5.0
_TTL_MAX_S: Final = 60.0
_CONFIRM_S: Final = 1.0


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    """Where one machine is.

    Attributes:
        host: An IP address.
        hostname: The name in its certificate.
        questions: What the address answers.
        has_own_port: Whether its record has the port.
    """

    host: str
    port: int
    hostname: str
    questions: tuple[str, ...] = field(default=(), compare=False)
    has_own_port: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        if not self.has_own_port:
            return self.host
        is_v6 = ipaddress.ip_address(self.host).version == 6
        return f"[{self.host}]:{self.port}" if is_v6 else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The records of one moment.

    Attributes:
        failures: Why a question has no answer, by question.
    """

    addresses: Collection[NodeAddress] = ()
    ttl_s: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a name.

    Attributes:
        addresses: In order.
        problem: Why that may not be what it stands for.
        ttl_s: How long the latest answer is valid.
        is_confirmed: Whether nothing contradicts the latest answer.
    """

    addresses: tuple[NodeAddress, ...] = ()
    problem: str | None = "it was not resolved yet"
    ttl_s: float = 0.0
    failures: int = 0
    is_confirmed: bool = True

    @property
    def pause_s(self) -> float:
        """The time until the next question."""
        if not self.is_confirmed:
            return _CONFIRM_S
        if self.failures:
            return min(_TTL_MIN_S * 2.0 ** min(self.failures - 1, 16), _TTL_MAX_S)
        return min(max(self.ttl_s, _TTL_MIN_S), _TTL_MAX_S)


def after(known: Known, answer: Answer, most: int = ADDRESSES_MAX) -> Known:
    """Return what is known after an answer; `most` addresses are what other names leave."""
    kept = (one for one in known.addresses if not answer.failures.keys().isdisjoint(one.questions))
    found = {*answer.addresses, *kept}
    failures = known.failures + 1 if answer.failures else 0
    if not found and not answer.failures and known.addresses and known.is_confirmed:
        problem = "it has no records any more; they are asked for once more"
        return Known(known.addresses, problem, is_confirmed=False)
    bounded = _bounded(found, known.addresses, most)
    return Known(bounded, _problem(found, answer, most), answer.ttl_s, failures)


def _bounded(
    found: Collection[NodeAddress], known: Collection[NodeAddress], most: int
) -> tuple[NodeAddress, ...]:
    """Return at most as many as are allowed, known ones first."""
    before = frozenset(known)
    first: Iterable[NodeAddress] = sorted(found, key=lambda one: (one not in before, one))
    return tuple(sorted(list(first)[:most]))


def _problem(found: Collection[NodeAddress], answer: Answer, most: int) -> str | None:
    if answer.failures:
        reasons = "; ".join(dict.fromkeys(answer.failures.values()))
        return f"{reasons}; {len(found)} known addresses are kept" if found else reasons
    if not found:
        return "it has no records"
    if len(found) > most:
        return (
            f"it has {len(found)} addresses, of which {most} are used: "
            f"all names together may have {ADDRESSES_MAX}"
        )
    return None
