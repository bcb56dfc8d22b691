"""Nodes of the settings with their keys and certificates, and the addresses of nodes' names.

A removed record removes its address at once. An empty answer counts once it is confirmed, and a
failed question changes nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from proxy.auth.keys_file import read_checked
from proxy.errors import ConfigError
from proxy.http.tls import RenewedContext, client_context
from proxy.nodes.settings import NodeSettings, parse_url
from proxy.observe.record import Emit
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, UpstreamRequest, fetch
from proxy.upstream.upstream import Node, Upstream

# The most addresses of one name, and of all names together.
ADDRESSES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Pauses and time limits of the work on nodes, in seconds."""

    # Between polls of a node that answers. retry_first_s, retry_max_s: Pauses after failed polls,
    # which grow. ttl_min_s, ttl_max_s: Bounds of a TTL: dnsmasq has 0 for its own records, others
    # have days.
    poll_s: float = 5.0
    retry_first_s: float = 1.0
    retry_max_s: float = 60.0
    ttl_min_s: float = 5.0
    ttl_max_s: float = 60.0
    confirm_s: float = 1.0  # Until an unexpected empty answer is confirmed.
    # The time that name servers have for an answer. digest_s, idle_digest_s: Between reads of a
    # node's prefixes, with and without recent news.
    dns_timeout_s: float = 5.0
    digest_s: float = 0.5
    idle_digest_s: float = 5.0
    loading_poll_s: float = 0.5  # Between polls while a node loads a model.
    # Between looks for requests that wait for a model another node could load.
    waiting_look_s: float = 2.0
    ask_s: float = 2.0  # For the answers of all nodes to a question about them.


NODE_TIMES: Final = NodeTimes()


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    host: str  # An IP address; from a file also a name.
    port: int
    hostname: str  # The name in its certificate.
    # The questions that the address answers.
    questions: tuple[str, ...] = field(default=(), compare=False)
    has_own_port: bool = field(default=False, compare=False)  # Whether its record has the port.

    def __str__(self) -> str:
        if not self.has_own_port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The records at one moment; `failures` are the reasons of failed questions, by question."""

    addresses: Collection[NodeAddress] = ()
    ttl_s: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    empty: str = "it has no records"  # The problem if there are no addresses.


@dataclass(frozen=True, slots=True)
class Known:
    addresses: tuple[NodeAddress, ...] = ()  # Sorted.
    problem: str | None = "it was not resolved yet"  # Why they may be wrong; None: they are right.
    ttl_s: float = 0.0  # How long the latest answer is valid.
    failures: int = 0  # Failed answers in a row.
    is_confirmed: bool = True  # False after an unexpected empty answer, until the next one.

    def pause_s(self, times: NodeTimes = NODE_TIMES) -> float:
        if not self.is_confirmed:
            return times.confirm_s
        if self.failures:
            return min(times.ttl_min_s * 2.0 ** min(self.failures - 1, 16), times.ttl_max_s)
        return min(max(self.ttl_s, times.ttl_min_s), times.ttl_max_s)


def after(known: Known, answer: Answer, most: int = ADDRESSES_MAX) -> Known:
    """Return the known addresses after an answer; `most` is the number that other names leave."""
    kept = (
        address
        for address in known.addresses
        if not answer.failures.keys().isdisjoint(address.questions)
    )
    found = {*answer.addresses, *kept}
    failures = known.failures + 1 if answer.failures else 0
    if not found and not answer.failures and known.addresses and known.is_confirmed:
        problem = f"{answer.empty} any more; it is asked once more"
        return Known(known.addresses, problem, is_confirmed=False)
    before = frozenset(known.addresses)
    first: Iterable[NodeAddress] = sorted(
        found, key=lambda address: (address not in before, address)
    )
    bounded = tuple(sorted(list(first)[:most]))
    return Known(bounded, _problem(found, answer, most), answer.ttl_s, failures)


def _problem(found: Collection[NodeAddress], answer: Answer, most: int) -> str | None:
    if answer.failures:
        reasons = "; ".join(dict.fromkeys(answer.failures.values()))
        return f"{reasons}; {len(found)} known addresses are kept" if found else reasons
    if not found:
        return answer.empty
    if len(found) > most:
        return (
            f"it has {len(found)} addresses, of which {most} are used: "
            f"all names together may have {ADDRESSES_MAX}"
        )
    return None


_KEY: Final = re.compile(rb"[!-~]+")
_KEY_HINT: Final = "it must contain only the node's API key, on one line"


@dataclass(frozen=True, slots=True)
class ConfiguredNode:
    """A node with its key, which is empty if the node needs none.

    `address` belongs to a machine that was found by the node's name; None: the url has the address.
    """

    name: str
    settings: NodeSettings
    api_key: str = field(default="", repr=False)
    tls: RenewedContext | None = field(default=None, compare=False, repr=False)
    address: NodeAddress | None = None

    @property
    def is_found(self) -> bool:
        return self.settings.parsed_url.discovery is not None

    @property
    def url(self) -> str:
        if self.address is None:
            return self.settings.url
        url = parse_url(self.settings.url)
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{'https' if url.is_tls else 'http'}://{host}:{self.address.port}{url.prefix}"

    def machine_at(self, address: NodeAddress) -> ConfiguredNode:
        return replace(self, name=f"{self.name}@{address}", address=address)

    async def fetch(
        self, request: UpstreamRequest, settings: ProxySettings, limit_s: float, max_bytes: int
    ) -> FetchedBody:
        """Return the node's whole response. Raises UpstreamTimeout, UpstreamFailed."""
        return await fetch(self.upstream("", "", 1), request, settings, limit_s, max_bytes)

    def upstream(
        self,
        model: str,
        here: str,
        slots: int,
        aliases: tuple[str, ...] = (),
        variants: tuple[str, ...] = (),
        *,
        process: str = "",
    ) -> Upstream:
        """Return a model as an instance; `model` is the node's id of it, `here` is ours."""
        url, address = self.settings.parsed_url, self.address
        return Upstream(
            name=f"{self.name}/{model}" if model else self.name,
            model=here,
            slots=slots,
            socket=None,
            host=address.host if address else url.host,
            port=address.port if address else url.port,
            api_key=self.api_key,
            aliases=aliases,
            node=Node(
                self.name,
                model,
                url.prefix,
                url.is_tls,
                self.settings.local_first,
                self.settings.weight,
                variants,
                self.tls.current if self.tls else None,
                address.hostname if address else "",
                process=process,
            ),
        )


def configured_nodes(tables: Mapping[str, NodeSettings], emit: Emit) -> list[ConfiguredNode]:
    """Read the keys and certificates of nodes. Raises ConfigError."""
    nodes: list[ConfiguredNode] = []
    for name, table in tables.items():
        key = read_key(table.key_file) if table.key_file else ""
        make = functools.partial(client_context, table.ca_file, table.cert, table.key)
        tls = RenewedContext(table.tls_files, make, emit) if table.tls_files else None
        nodes.append(ConfiguredNode(name, table, key, tls))
    return nodes


def read_key(path: Path) -> str:
    """Read a node's key. Raises ConfigError: no file, open to others, or not exactly one key."""
    missing = "write the node's key into it, or unset key_file of the node"
    text, _ = read_checked(path, "the key file", 4096, missing=missing, wrong=_KEY_HINT)
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"the key file {path} does not hold one key", _KEY_HINT)
    return key.decode()
