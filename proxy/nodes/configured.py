"""A node of the settings with its key and its certificates, or one of its machines."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from proxy.access_log import Emit
from proxy.auth.secret_file import read_private
from proxy.errors import ConfigError
from proxy.nodes.addresses import NodeAddress
from proxy.nodes.settings import NodeSettings
from proxy.nodes.url import parse_url
from proxy.tls.contexts import client_context
from proxy.tls.renewed import RenewedContext
from proxy.upstream.upstream import Node, Upstream

_KEY_FILE_MAX_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")
_KEY_HINT: Final = "it must contain only the node's API key, on one line"


@dataclass(frozen=True, slots=True)
class ConfiguredNode:
    """A node with its key, which is empty if the node needs none.

    `address`: where a machine is that was found by the node's name; None: where the url says.
    """

    name: str
    settings: NodeSettings
    api_key: str = field(default="", repr=False)
    tls: RenewedContext | None = field(default=None, compare=False, repr=False)
    address: NodeAddress | None = None

    @property
    def is_found(self) -> bool:
        """Whether its address comes from records."""
        return self.settings.parsed_url.discovery is not None

    @property
    def url(self) -> str:
        """Where it is, for people."""
        if self.address is None:
            return self.settings.url
        url = parse_url(self.settings.url)
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{'https' if url.is_tls else 'http'}://{host}:{self.address.port}{url.prefix}"

    def at(self, address: NodeAddress) -> ConfiguredNode:
        """Return one of its machines."""
        return replace(self, name=f"{self.name}@{address}", address=address)

    def upstream(
        self,
        name: str,
        model: str,
        here: str,
        slots: int,
        aliases: tuple[str, ...] = (),
        variants: tuple[str, ...] = (),
    ) -> Upstream:
        """A model of the node as an instance; `model` is the node's id of it, `here` ours."""
        url, address = self.settings.parsed_url, self.address
        return Upstream(
            name=name,
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
            ),
        )


def configured_nodes(tables: Mapping[str, NodeSettings], emit: Emit) -> list[ConfiguredNode]:
    """The nodes with their keys and certificates. Raises ConfigError."""
    return [
        ConfiguredNode(
            name, table, read_key(table.key_file) if table.key_file else "", _tls(table, emit)
        )
        for name, table in tables.items()
    ]


def _tls(table: NodeSettings, emit: Emit) -> RenewedContext | None:
    make = functools.partial(client_context, table.ca_file, table.cert, table.key)
    return RenewedContext(table.tls_files, make, emit) if table.tls_files else None


def read_key(path: Path) -> str:
    """Raises ConfigError if the file is missing, open to others, or has not exactly one key."""
    missing = "write the node's key into it, or unset key_file of the node"
    text, _ = read_private(
        path, "the key file", _KEY_FILE_MAX_BYTES, missing=missing, wrong=_KEY_HINT
    )
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"the key file {path} does not hold one key", _KEY_HINT)
    return key.decode()
