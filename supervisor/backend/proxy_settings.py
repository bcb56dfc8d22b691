"""Checks the proxy's settings; raises SettingsInvalid in place of the proxy's ConfigError."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.auth.keys_file import Key, read_keys
from proxy.common.toml_types import host_of, is_loopback
from proxy.errors import ConfigError
from proxy.http.middleware import check
from proxy.http.tls import server_context
from proxy.nodes.configured import ConfiguredNode, configured_nodes
from proxy.nodes.settings import NodeSettings
from proxy.observe.record import Emit
from proxy.settings import ProxySettings, TlsSettings
from supervisor.errors import SettingsInvalid


def read_nodes(tables: Mapping[str, NodeSettings], emit: Emit) -> list[ConfiguredNode]:
    with as_settings_invalid():
        return configured_nodes(tables, emit)


def check_proxy_settings(settings: ProxySettings) -> ProxySettings:
    with as_settings_invalid():
        check(settings)
    return settings


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    with as_settings_invalid():
        return server_context(settings)


def api_keys(path: Path) -> tuple[Key, ...]:
    with as_settings_invalid():
        return read_keys(path)[0]


def keyless_addresses(settings: ProxySettings) -> tuple[str, ...]:
    """Return the addresses at which other machines can send requests without a key."""
    if settings.api_keys_file or (settings.tls and settings.tls.client_ca):
        return ()
    addresses = (settings.listen, settings.ollama.listen, settings.engine_ui)
    return tuple(address for address in addresses if address and not is_loopback(host_of(address)))


@contextmanager
def as_settings_invalid() -> Iterator[None]:
    """Raise the proxy's ConfigError as SettingsInvalid."""
    try:
        yield
    except ConfigError as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
