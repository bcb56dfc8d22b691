"""Checks the proxy's settings, and applies new ones to its certificate and nodes.

Raises SettingsInvalid in place of the proxy's ConfigError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.auth.keys_file import Key, read_keys
from proxy.common.toml_types import host_of, is_loopback
from proxy.errors import ConfigError
from proxy.http.middleware import check
from proxy.http.tls import renewed_server_context, server_context
from proxy.nodes.configured import ConfiguredNode, configured_nodes
from proxy.nodes.nodes import Nodes
from proxy.nodes.settings import NodeSettings
from proxy.observe.record import Emit
from proxy.settings import ProxySettings, TlsSettings
from supervisor.errors import SettingsInvalid
from supervisor.settings.load import Loaded


def read_nodes(tables: Mapping[str, NodeSettings], emit: Emit) -> list[ConfiguredNode]:
    with as_settings_invalid():
        return configured_nodes(tables, emit)


def prepare_nodes(nodes: Nodes, emit: Emit, loaded: Loaded) -> Callable[[], None]:
    """Check the nodes of new settings; return the function that applies them."""
    return functools.partial(nodes.set_nodes, read_nodes(loaded.settings.nodes, emit))


class Certificate:
    """The files of the proxy's TLS. It cannot be turned on or off while the proxy listens.

    `context` is the context of its connections; None without TLS.
    """

    def __init__(self, settings: TlsSettings | None, emit: Emit) -> None:
        self._settings = settings
        self.context = renewed_server_context(settings, emit)

    @property
    def path(self) -> str | None:
        return str(self._settings.cert) if self._settings else None

    def prepare(self, loaded: Loaded) -> Callable[[], None]:
        """Check the files of new settings; return the function that applies them."""
        renewed, tls = self.context, loaded.settings.proxy.tls or self._settings
        if renewed is None or tls is None:
            return lambda: None
        with as_settings_invalid():
            context = server_context(tls)

        def apply() -> None:
            self._settings = tls
            renewed.follow(tls.files, functools.partial(server_context, tls), context)

        return apply


def check_proxy_settings(settings: ProxySettings) -> ProxySettings:
    with as_settings_invalid():
        check(settings)
    return settings


def api_keys(path: Path) -> tuple[Key, ...]:
    with as_settings_invalid():
        return read_keys(path)[0]


def keyless_addresses(settings: ProxySettings) -> tuple[str, ...]:
    """Return the addresses at which other machines can send requests without a key."""
    if settings.api_keys_file or (settings.tls and settings.tls.client_ca):
        return ()
    return outside_addresses(settings)


def outside_addresses(settings: ProxySettings) -> tuple[str, ...]:
    """Return the addresses that other machines can reach."""
    addresses = (settings.listen, settings.ollama.listen, settings.engine_ui)
    return tuple(address for address in addresses if address and not is_loopback(host_of(address)))


@contextmanager
def as_settings_invalid() -> Iterator[None]:
    """Raise the proxy's ConfigError as SettingsInvalid."""
    try:
        yield
    except ConfigError as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
