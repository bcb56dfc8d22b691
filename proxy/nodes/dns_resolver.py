"""Asks name servers for the addresses of a name: A, AAAA and SRV records.

dnspython and not the system's resolver, which tells no TTL and knows no SRV. /etc/resolv.conf, with
its search domains, is read for each answer; /etc/hosts is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.resolver import NXDOMAIN, LifetimeTimeout, NoNameservers

from proxy.nodes.addresses import ADDRESSES_MAX, Answer, NodeAddress
from proxy.nodes.dns_sockets import DnsSockets
from proxy.nodes.url import NameServer, NodeUrl

_LIFETIME_S: Final = 5.0
_QUERIES_MAX: Final = 16
_REASON_MAX_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class _Found:
    """The records of one question; `failure` is why there is no answer."""

    question: str
    records: Sequence[Any] = ()
    ttl_s: float = 0.0
    failure: str | None = None


async def resolve(url: NodeUrl, name_server: NameServer | None) -> Answer:
    """Ask for what a url stands for; without `name_server`, the system's are asked."""
    try:
        queries = _Queries(name_server)
    except (DNSException, OSError) as error:
        return Answer(failures={url.host: f"/etc/resolv.conf cannot be used: {_short(error)}"})
    if url.is_service:
        return await queries.services(url.host)
    return await queries.machines([(url.host, url.port)])


class _Queries:
    def __init__(self, name_server: NameServer | None) -> None:
        self._resolver = Resolver(configure=name_server is None)
        self._resolver.lifetime = _LIFETIME_S
        if name_server is not None:
            self._resolver.nameservers = [name_server.host]
            self._resolver.port = name_server.port
        self._sockets = DnsSockets()
        self._turns = asyncio.Semaphore(_QUERIES_MAX)

    async def services(self, name: str) -> Answer:
        """Return the addresses behind the SRV records of the first priority."""
        found = await self._ask(name, "SRV")
        if found.failure:
            return Answer(failures={found.question: found.failure})
        first = min((one.priority for one in found.records), default=0)
        targets = sorted(
            (str(one.target).rstrip("."), int(one.port))
            for one in found.records
            if one.priority == first
        )
        # A target "." says that there is no such service. Source: RFC 2782.
        named = [target for target in targets if target[0]][:ADDRESSES_MAX]
        machines = await self.machines(named, found.question)
        ttl_s = min(found.ttl_s, machines.ttl_s) if named else found.ttl_s
        return Answer(machines.addresses, ttl_s, machines.failures)

    async def machines(self, targets: Sequence[tuple[str, int]], service: str = "") -> Answer:
        """Return the addresses of hosts with ports; `service` is the question that named them."""
        async with asyncio.TaskGroup() as group:
            asked = [
                (host, port, group.create_task(self._ask(host, kind)))
                for host, port in targets
                for kind in ("A", "AAAA")
            ]
        found = [(host, port, task.result()) for host, port, task in asked]
        addresses = tuple(
            NodeAddress(
                host=record.address,
                port=port,
                hostname=host,
                questions=(answer.question, service),
                has_own_port=bool(service),
            )
            for host, port, answer in found
            for record in answer.records
        )
        answers = [answer for _, _, answer in found]
        failures = {one.question: one.failure for one in answers if one.failure}
        return Answer(addresses, _ttl_s(answers), failures)

    async def _ask(self, name: str, kind: str) -> _Found:
        question = f"{kind} {name}"
        try:
            async with self._turns:
                answer = await self._resolver.resolve(
                    name, kind, raise_on_no_answer=False, search=True, backend=self._sockets
                )
        except NXDOMAIN:
            return _Found(question)
        except (DNSException, OSError) as error:
            return _Found(question, failure=f"{question}: {_short(error)}")
        rrset = answer.rrset
        return _Found(question, list(rrset), float(rrset.ttl)) if rrset else _Found(question)


def _ttl_s(answers: Iterable[_Found]) -> float:
    return min((one.ttl_s for one in answers if one.records), default=0.0)


def _short(error: Exception) -> str:
    if isinstance(error, LifetimeTimeout):
        return "no name server answers"
    if isinstance(error, NoNameservers):
        failed = error.kwargs.get("errors") or [("", "", "", "no usable answer")]
        return f"the name server fails: {failed[-1][3]}"[:_REASON_MAX_CHARACTERS]
    return str(error)[:_REASON_MAX_CHARACTERS]
