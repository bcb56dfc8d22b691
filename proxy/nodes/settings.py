"""`[nodes.NAME]`: another machine whose models are served here too."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from proxy.access_log import Emit
from proxy.auth.secret_file import read_private
from proxy.config.types import ExpandedPath, SettingsTable, Text
from proxy.errors import ConfigError
from proxy.tls.contexts import client_context
from proxy.tls.renewed import RenewedContext
from proxy.upstream.upstream import Node, Upstream

_PORTS: Final = {"http": 80, "https": 443}
_KEY_FILE_MAX_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")
_KEY_HINT: Final = "it must contain only the node's API key, on one line"


def _node_url(url: str) -> str:
    """Normalise a node's base URL: without a trailing `/v1`, which clients add."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment or not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # reading `port` rejects other invalid ones
        raise ValueError("not a port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class NodeSettings(SettingsTable):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: Annotated[str, AfterValidator(_node_url)] = Field(
        description="its base URL, as http://192.168.1.7:8080: another llama-corral, a "
        "llama-server, or any server with OpenAI's API"
    )
    key_file: ExpandedPath | None = Field(
        None, description="file with its API key, readable by this user alone"
    )
    ca_file: ExpandedPath | None = Field(
        None, description="PEM file of the CAs that its https is trusted by; unset: the system's"
    )
    cert: ExpandedPath | None = Field(
        None, description="PEM file of the certificate to show it, where it demands one; needs key"
    )
    key: ExpandedPath | None = Field(
        None, description="PEM file of the key of cert, readable by this user alone"
    )
    models: tuple[Text, ...] = Field((), description="ids of its models to serve here; unset: all")
    slots: int = Field(
        4,
        ge=1,
        le=1024,
        description="concurrent requests for each model, if it does not report its slots",
    )
    local_first: bool = Field(
        default=True,
        description="whether it gets new conversations only when no local slot is free; "
        "a conversation that began there stays there",
    )
    weight: float | None = Field(
        None,
        gt=0,
        le=100,
        description="its share of requests as a multiple of an average instance's; "
        "unset: by its measured speed",
    )

    @property
    def tls_files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca_file, self.cert, self.key) if path is not None)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: set both or none")
        if self.tls_files and not self.url.startswith("https://"):
            raise ValueError("ca_file, cert and key are for a url with https://")
        return self


@dataclass(frozen=True, slots=True)
class ConfiguredNode:
    """A node with its key, which is empty if the node needs none."""

    name: str
    settings: NodeSettings
    api_key: str = field(default="", repr=False)
    tls: RenewedContext | None = field(default=None, compare=False, repr=False)

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
        parts = urlsplit(self.settings.url)
        return Upstream(
            name=name,
            model=here,
            slots=slots,
            socket=None,
            host=parts.hostname or "",
            port=parts.port or _PORTS[parts.scheme],
            api_key=self.api_key,
            aliases=aliases,
            node=Node(
                self.name,
                model,
                parts.path,
                parts.scheme == "https",
                self.settings.local_first,
                self.settings.weight,
                variants,
                self.tls.current if self.tls else None,
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
