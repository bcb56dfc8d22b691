"""Checks of the proxy's settings; all raise SettingsInvalid in place of the proxy's ConfigError."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.access_log import Emit
from proxy.auth.keys_file import Key, read_keys
from proxy.config.address import host_of, is_loopback
from proxy.errors import ConfigError
from proxy.middleware import check
from proxy.nodes.configured import ConfiguredNode, configured_nodes
from proxy.nodes.settings import NodeSettings
from proxy.settings import ProxySettings
from proxy.tls.contexts import server_context
from proxy.tls_config import TlsSettings
from supervisor.errors import SettingsInvalid


def read_nodes(tables: Mapping[str, NodeSettings], emit: Emit) -> list[ConfiguredNode]:
    with explained():
        return configured_nodes(tables, emit)


def checked(settings: ProxySettings) -> ProxySettings:
    with explained():
        check(settings)
    return settings


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    with explained():
        return server_context(settings)


def api_keys(path: Path) -> tuple[Key, ...]:
    with explained():
        return read_keys(path)[0]


def keyless_addresses(settings: ProxySettings) -> tuple[str, ...]:
    """Return the addresses at which other machines can send requests without a key."""
    if settings.api_keys_file or (settings.tls and settings.tls.client_ca):
        return ()
    addresses = (settings.listen, settings.ollama.listen, settings.engine_ui)
    return tuple(one for one in addresses if one and not is_loopback(host_of(one)))


@contextmanager
def explained() -> Iterator[None]:
    """Raise the proxy's ConfigError as SettingsInvalid."""
    try:
        yield
    except ConfigError as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
