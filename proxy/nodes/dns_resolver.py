"""Asks name servers for the addresses of a name: A, AAAA and SRV records. Imported only if needed.

It uses dnspython, because the system's resolver reports no TTL and supports no SRV. For each answer
it reads /etc/resolv.conf with its search domains, but not /etc/hosts.

dnspython's own sockets are asyncio's datagram endpoints: if a query is cancelled while one is being
created, uvloop 0.23 waits for it forever when the loop is closed, at the end of a daemon. So this
module gives dnspython UDP sockets that a cancelled query closes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final

from dns._asyncbackend import DatagramSocket  # its public modules export the same
from dns._asyncio_backend import Backend
from dns.asyncresolver import Resolver
from dns.exception import DNSException, Timeout
from dns.resolver import NXDOMAIN, LifetimeTimeout, NoNameservers

from proxy.nodes.configured import ADDRESSES_MAX, NODE_TIMES, Answer, NodeAddress
from proxy.nodes.settings import NodeUrl


class _DnsSockets(Backend):
    """dnspython's backend for asyncio, with other UDP sockets."""

    async def make_socket(self, af: int, socktype: int, *rest: Any, **options: Any) -> Any:
        if socktype == socket.SOCK_DGRAM:
            return _UdpSocket(af)
        return await super().make_socket(af, socktype, *rest, **options)  # type: ignore[no-untyped-call]


class _UdpSocket(DatagramSocket):
    """A socket for one name server."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_DGRAM)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.settimeout(0)

    async def sendto(self, what: bytes, destination: Any, _timeout: float | None) -> int:
        self._socket.connect(destination)
        await asyncio.get_running_loop().sock_sendall(self._socket, what)
        return len(what)

    async def recvfrom(self, size: int, timeout: float | None) -> tuple[bytes, Any]:  # noqa: ASYNC109 (dnspython's)
        try:
            async with asyncio.timeout(timeout):
                wire = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except TimeoutError as error:
            raise Timeout from error
        return wire, self._socket.getpeername()

    async def close(self) -> None:
        self._socket.close()

    async def getpeername(self) -> Any:
        return self._socket.getpeername()

    async def getsockname(self) -> Any:
        return self._socket.getsockname()


_REASON_MAX_CHARACTERS: Final = 200


async def resolve(
    url: NodeUrl, name_server: tuple[str, int] | None, timeout_s: float = NODE_TIMES.dns_timeout_s
) -> Answer:
    """Resolve a url's name; without `name_server` (address, port), the system's are asked."""
    try:
        queries = _Queries(name_server, timeout_s)
    except (DNSException, OSError) as error:
        return Answer(
            failures={url.host: f"/etc/resolv.conf cannot be used: {_failure_text(error)}"}
        )
    if url.is_service:
        return await queries.services(url.host)
    return await queries.machines([(url.host, url.port)])


class _Queries:
    def __init__(self, name_server: tuple[str, int] | None, timeout_s: float) -> None:
        self._resolver = Resolver(configure=name_server is None)
        self._resolver.lifetime = timeout_s
        if name_server is not None:
            host, self._resolver.port = name_server
            self._resolver.nameservers = [host]
        self._sockets = _DnsSockets()
        self._turns = asyncio.Semaphore(16)

    async def services(self, name: str) -> Answer:
        """Return the addresses behind the SRV records of the first priority."""
        question = f"SRV {name}"
        records, found_ttl_s, failure = await self._ask(question)
        if failure:
            return Answer(failures={question: failure})
        first = min((record.priority for record in records), default=0)
        targets = sorted(
            (str(record.target).rstrip("."), int(record.port))
            for record in records
            if record.priority == first
        )
        # A target "." says that there is no such service. Source: RFC 2782.
        named = [target for target in targets if target[0]][:ADDRESSES_MAX]
        machines = await self.machines(named, question)
        ttl_s = min(found_ttl_s, machines.ttl_s) if named else found_ttl_s
        return Answer(machines.addresses, ttl_s, machines.failures)

    async def machines(self, targets: Sequence[tuple[str, int]], service: str = "") -> Answer:
        """Return the addresses of hosts with ports; `service` is the question that named them."""
        async with asyncio.TaskGroup() as group:
            asked = [
                (host, port, question, group.create_task(self._ask(question)))
                for host, port in targets
                for question in (f"A {host}", f"AAAA {host}")
            ]
        addresses: list[NodeAddress] = []
        failures: dict[str, str] = {}
        ttls_s: list[float] = []
        for host, port, question, task in asked:
            records, ttl_s, failure = task.result()
            if failure:
                failures[question] = failure
            if records:
                ttls_s.append(ttl_s)
            addresses += [
                NodeAddress(
                    host=record.address,
                    port=port,
                    hostname=host,
                    questions=(question, service),
                    has_own_port=bool(service),
                )
                for record in records
            ]
        return Answer(tuple(addresses), min(ttls_s, default=0.0), failures)

    async def _ask(self, question: str) -> tuple[Sequence[Any], float, str | None]:
        """Return the records for `KIND NAME`, their TTL, and why there is no answer."""
        kind, name = question.split(" ", 1)
        try:
            async with self._turns:
                answer = await self._resolver.resolve(
                    name, kind, raise_on_no_answer=False, search=True, backend=self._sockets
                )
        except NXDOMAIN:
            return (), 0.0, None
        except (DNSException, OSError) as error:
            return (), 0.0, f"{question}: {_failure_text(error)}"
        rrset = answer.rrset
        return (list(rrset), float(rrset.ttl), None) if rrset else ((), 0.0, None)


def _failure_text(error: Exception) -> str:
    if isinstance(error, LifetimeTimeout):
        return "no name server answers"
    if isinstance(error, NoNameservers):
        failed = error.kwargs.get("errors") or [("", "", "", "no usable answer")]
        return f"the name server fails: {failed[-1][3]}"[:_REASON_MAX_CHARACTERS]
    return str(error)[:_REASON_MAX_CHARACTERS]
