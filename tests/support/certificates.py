"""Certificate authorities and PEM files of a test."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trustme

PAST = datetime(2001, 1, 1, tzinfo=UTC), datetime(2002, 1, 1, tzinfo=UTC)


def write(directory: Path, issued: trustme.LeafCert, name: str = "server") -> dict[str, Path]:
    """Write a certificate and its key; return their settings."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.touch(0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    return {"cert": cert, "key": key}


def write_ca(path: Path, authority: trustme.CA) -> Path:
    path.write_bytes(authority.cert_pem.bytes())
    return path


def expired(authority: trustme.CA, name: str = "127.0.0.1") -> trustme.LeafCert:
    return authority.issue_cert(name, not_before=PAST[0], not_after=PAST[1])


def trusting(authority: trustme.CA, own: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """Return a client's context."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if own:
        own.configure_cert(context)
    return context


def serial(connection: Any) -> str:
    """Return the serial number of the certificate that the other side has shown."""
    found = connection.get_extra_info("ssl_object").getpeercert()
    return str(found["serialNumber"])
