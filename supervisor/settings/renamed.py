"""Old names of settings; the error for one names the new one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_PROXY: Final = {
    "head_timeout_s": "header_timeout_s",
    "hosts": "allowed_hosts",
    "index_max": "prefix_index_max_blocks",
    "keys_file": "api_keys_file",
    "line_max": "queue_max",
    "origins": "allowed_origins",
    "patience_s": "queue_timeout_s",
    "silence_timeout_s": "upstream_read_timeout_s",
    "unread_timeout_s": "client_write_timeout_s",
}
_SUPERVISOR: Final = {
    "give_up_below": "abandon_load_below",
    "keep_slots": "persist_slots",
    "save_timeout_s": "slot_save_timeout_s",
    "slots_budget": "slots_disk_budget",
    "swap_wait_s": "eviction_wait_s",
    "unwell_timeout_s": "unhealthy_timeout_s",
}
_RESTART: Final = {
    "base_s": "backoff_initial_s",
    "breaker": "max_failures",
    "cap_s": "backoff_max_s",
    "half_life_s": "failure_half_life_s",
}
_BY_TABLE: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {"proxy": _PROXY, "supervisor": _SUPERVISOR, "restart": _RESTART}
)


def new_name(table: str, key: str) -> str | None:
    """Return the new name of a setting; `table` is the last part, as `restart` of a model's."""
    return _BY_TABLE.get(table, {}).get(key)
