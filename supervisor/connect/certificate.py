"""The daemon's certificate, as far as its clients have to know of it."""

from __future__ import annotations

from pathlib import Path


def self_signed(path: str | None) -> Path | None:
    """Return a certificate if it signed itself: then clients can trust that alone."""
    if path is None:
        return None
    # Imported here: few daemons have a certificate.
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415

    try:
        found = load_pem_x509_certificates(Path(path).read_bytes())[0]
    except (OSError, ValueError, IndexError):  # the daemon reports it
        return None
    return Path(path) if found.issuer == found.subject else None
