"""What the settings say of the proxy, as it wants to be told; what it refuses is their error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.auth.keys_file import Key, read_keys
from proxy.auth.origin import is_loopback
from proxy.errors import ConfigError
from proxy.middleware import check
from proxy.nodes.key_file import read_key
from proxy.nodes.settings import NodeSettings
from proxy.request_limits.limits import RequestLimits
from proxy.settings import ProxySettings
from supervisor.errors import SettingsInvalid
from supervisor.settings.tables import NodeTable, ProxyTable


def node_settings(tables: Mapping[str, NodeTable]) -> list[NodeSettings]:
    """Return what is set for each node, with its key.

    Raises:
        SettingsInvalid: The file of a key is not there, others may read it, or it holds no key.
    """
    with explained():
        return [
            NodeSettings(
                name=name,
                url=table.url,
                api_key=read_key(table.key_file) if table.key_file else "",
                models=frozenset(table.models),
                slots=table.slots,
                is_spare=table.local_first,
            )
            for name, table in tables.items()
        ]


def proxy_settings(table: ProxyTable) -> ProxySettings:
    """Return the proxy's settings from those of the file.

    Raises:
        SettingsInvalid: An origin, a host or the file of API keys is wrong.
    """
    host, _, port = table.listen.rpartition(":")
    settings = ProxySettings(
        host=host.strip("[]"),
        port=int(port),
        limits=RequestLimits(**table.limits.model_dump()),
        **table.model_dump(exclude={"listen", "limits"}),
    )
    with explained():
        check(settings)
    return settings


def api_keys(path: Path) -> tuple[Key, ...]:
    """Return the API keys of a file.

    Raises:
        SettingsInvalid: It is not there, others may read it, or something in it is wrong.
    """
    with explained():
        return read_keys(path)[0]


def is_open_to_all(table: ProxyTable) -> bool:
    """Return whether machines besides this one may ask, without a key."""
    host, _, _ = table.listen.rpartition(":")
    return table.api_keys_file is None and not is_loopback(host.strip("[]"))


@contextmanager
def explained() -> Iterator[None]:
    """Let what the proxy cannot work with become an error of the settings.

    Raises:
        SettingsInvalid: Its own error was ConfigError.
    """
    try:
        yield
    except ConfigError as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
