"""The `.socket` unit, which keeps the address of clients open while the daemon restarts. Pure."""

from __future__ import annotations

import ipaddress

from proxy.settings import ProxySettings
from supervisor.service.facts import NAME
from supervisor.service.unit_text import unit_text


def socket_unit(settings: ProxySettings) -> str | None:
    """Return None for a host name or for any free port: the daemon then listens itself."""
    try:
        address = ipaddress.ip_address(settings.host)
    except ValueError:
        return None
    if settings.port == 0:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    lines = [f"ListenStream={host}:{settings.port}", "FileDescriptorName=http"]
    # As asyncio's own sockets. Source: Python, loop.create_server.
    lines += ["BindIPv6Only=ipv6-only"] if address.version == 6 else []
    # The address of an interface that comes up later.
    lines += [] if address.is_loopback or address.is_unspecified else ["FreeBind=yes"]
    return unit_text(
        f"{NAME}.socket",
        ("Unit", ["Description=Clients of llama-corral"]),
        ("Socket", lines),
        ("Install", ["WantedBy=sockets.target"]),
    )
