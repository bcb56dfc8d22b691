"""Looks at who may ask: API keys, hosts and origins."""

from __future__ import annotations

from typing import Final

from proxy.settings import ProxySettings
from supervisor.doctor.finding import Finding, failed
from supervisor.errors import SettingsInvalid
from supervisor.proxy_adapter.settings import api_keys, checked, is_open_to_all

_NAME: Final = "clients"
_ASK_FOR_KEYS: Final = "corral key add NAME makes a key; then set api_keys_file under [proxy]"


def check_clients(table: ProxySettings) -> Finding:
    """Look at who is let in, and by what."""
    try:
        checked(table)
        keys = api_keys(table.api_keys_file) if table.api_keys_file else None
    except SettingsInvalid as error:
        return failed(_NAME, error)
    if is_open_to_all(table):
        text = f"{table.listen} can be reached from other machines, and no key is asked for"
        return Finding(_NAME, "warn", text, _ASK_FOR_KEYS)
    if keys is None:
        return Finding(_NAME, "ok", "programs of this machine, without a key")
    if not keys:
        return Finding(
            _NAME, "warn", f"{table.api_keys_file} has no key: nobody may ask", _ASK_FOR_KEYS
        )
    names = "key" if len(keys) == 1 else "keys"
    return Finding(_NAME, "ok", f"{len(keys)} API {names} in {table.api_keys_file}")
