"""`[nodes.NAME]`: another machine whose models are served here too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.nodes.key_file import read_key
from proxy.setting_types import ExpandedPath, SettingsTable, Text
from proxy.upstream.upstream import Node, Upstream

_PORTS = {"http": 80, "https": 443}


def _node_url(url: str) -> str:
    """Return where a node's pages are, without the `/v1` that clients want behind it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment or not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # to read it refuses whatever else is no port
        raise ValueError("not a port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class NodeSettings(SettingsTable):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: Annotated[str, AfterValidator(_node_url)] = Field(
        description="where it listens, as http://192.168.1.7:8080: another llama-corral, a "
        "llama-server, or anything with OpenAI's API"
    )
    key_file: ExpandedPath | None = Field(
        None, description="file with the API key it asks for, readable by this user alone"
    )
    models: tuple[Text, ...] = Field(
        (), description="those of its models that are served here; unset: all"
    )
    slots: int = Field(
        4, ge=1, le=1024, description="requests it gets at once, where it does not say itself"
    )
    local_first: bool = Field(
        default=True,
        description="whether it is asked only when nothing here has a slot free; "
        "a conversation that began there stays there",
    )


@dataclass(frozen=True, slots=True)
class ConfiguredNode:
    """A node with its key, which is empty where the node needs none."""

    name: str
    settings: NodeSettings
    api_key: str = field(default="", repr=False)

    def upstream(
        self, name: str, model: str, here: str, slots: int, aliases: tuple[str, ...] = ()
    ) -> Upstream:
        """Return a model of the node as an instance.

        Args:
            name: The name of the instance.
            model: What the node calls the model.
            here: The id of the model that it serves here.
            slots: Requests that it gets at once.
            aliases: Other names of the model.
        """
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
                self.name, model, parts.path, parts.scheme == "https", self.settings.local_first
            ),
        )


def configured_nodes(tables: Mapping[str, NodeSettings]) -> list[ConfiguredNode]:
    """Return the nodes with their keys.

    Raises:
        ConfigError: A key file is missing, readable by others, or holds no key.
    """
    return [
        ConfiguredNode(name, table, read_key(table.key_file) if table.key_file else "")
        for name, table in tables.items()
    ]
