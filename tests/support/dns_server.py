"""A name server on loopback, by UDP and TCP, whose zone and faults a test sets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.rcode import Rcode


class FakeDns:
    """Answers from `records` (by "KIND name"), else with `missing`.

    Attributes:
        failing: Questions that get SERVFAIL.
        silent: Whether nothing is answered.
        truncates: Whether UDP has no room for any record.
        asked: Every question, in order.
    """

    def __init__(self, ttl_s: int = 0) -> None:
        self.records: dict[str, list[str]] = {}
        self.missing = Rcode.NXDOMAIN
        self.failing: set[str] = set()
        self.silent = False
        self.truncates = False
        self.asked: list[str] = []
        self.port = 0
        self._ttl_s = ttl_s

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeDns]:
        loop = asyncio.get_running_loop()
        tcp = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = tcp.sockets[0].getsockname()[1]
        udp, _ = await loop.create_datagram_endpoint(
            lambda: _Udp(self), local_addr=("127.0.0.1", self.port)
        )
        try:
            yield self
        finally:
            udp.close()
            tcp.close()

    def answer(self, wire: bytes, *, is_udp: bool) -> bytes | None:
        query = dns.message.from_wire(wire)
        (question,) = query.question
        asked = f"{question.rdtype.name} {question.name.to_text(omit_final_dot=True)}"
        self.asked.append(asked)
        if self.silent:
            return None
        response = dns.message.make_response(query)
        records = self.records.get(asked)
        if asked in self.failing:
            response.set_rcode(Rcode.SERVFAIL)
        elif is_udp and self.truncates:
            response.flags |= dns.flags.TC
        elif records:
            response.answer.append(
                dns.rrset.from_text_list(question.name, self._ttl_s, "IN", question.rdtype, records)
            )
        elif asked.partition(" ")[2] not in {record.partition(" ")[2] for record in self.records}:
            response.set_rcode(self.missing)
        return response.to_wire()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        if wire := self.answer(await reader.readexactly(length), is_udp=False):
            writer.write(struct.pack("!H", len(wire)) + wire)
        writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: FakeDns) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        if wire := self._server.answer(data, is_udp=True):
            self._transport.sendto(wire, addr)
