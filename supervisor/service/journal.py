"""Entries of the systemd journal with fields: `journalctl CORRAL_MODEL=chat`.

Source: systemd.io, "Native Journal Protocol"; systemd.journal-fields(7).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.events import Event, key_values

JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
# Source: sd-daemon(3), SD_ERR, SD_WARNING and SD_INFO.
PRIORITIES: Final[Mapping[str, int]] = MappingProxyType({"error": 3, "warning": 4, "info": 6})
_IDENTIFIER: Final = "llama-corral"
# An entry is one datagram, and the kernel takes 208 KiB. Source: socket(7), wmem_default.
_VALUE_MAX_BYTES: Final = 8 * 1024
_SEND_TIMEOUT_S: Final = 0.1


def message_of(event: Event) -> str:
    return f"{event.name} {key_values(event.fields)}".rstrip()


def journal_entry(event: Event) -> bytes:
    """Return the entry of an event; each of its fields is CORRAL_FIELD."""
    return b"".join(_field(name, value) for name, value in _fields(event))


def send_to_journal(entry: bytes, journal: Path = JOURNAL_SOCKET) -> bool:
    """Return whether the journal took the entry."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_SEND_TIMEOUT_S)
            channel.sendto(entry, str(journal))
    except OSError:
        return False
    return True


def _fields(event: Event) -> Iterator[tuple[str, str]]:
    yield "MESSAGE", message_of(event)
    yield "PRIORITY", str(PRIORITIES[event.level])
    yield "SYSLOG_IDENTIFIER", _IDENTIFIER
    yield "CORRAL_EVENT", event.name
    for name, value in event.fields.items():
        if value is not None and name != "event":
            yield f"CORRAL_{name.upper()}", str(value)


def _field(name: str, value: str) -> bytes:
    """With its length, so that a value cannot add a field."""
    data = value.encode(errors="backslashreplace")[:_VALUE_MAX_BYTES]
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
