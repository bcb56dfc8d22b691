"""Which machines can reach an address. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Final, Literal

Exposure = Literal["loopback", "private", "public", "every"]

# Private (RFC 1918), shared by a provider or an overlay network (RFC 6598), and link-local
# (RFC 3927).
_PRIVATE: Final = tuple(
    map(
        IPv4Network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
    )
)


def exposure(host: str) -> Exposure | None:
    """Return who reaches an IPv4 address, `every` for all of a machine's; None for a name."""
    if host == "localhost":
        return "loopback"
    try:
        address = IPv4Address(host)
    except ValueError:
        return None
    if address.is_unspecified:
        return "every"
    if address.is_loopback:
        return "loopback"
    return "private" if any(address in one for one in _PRIVATE) else "public"
