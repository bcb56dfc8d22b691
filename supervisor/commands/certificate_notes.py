"""Notes of `corral config check` on certificates that are not valid now."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from cryptography import x509

from supervisor.settings.schema import Settings


def certificate_notes(settings: Settings, now: datetime) -> Iterator[str]:
    """Yield a sentence for each certificate that has expired or is not valid yet."""
    for setting, path in _files(settings):
        for found in _certificates(path):
            if (problem := _problem(found, now)) is not None:
                yield f"{setting}: {path}: the certificate {_name(found)} {problem}"


def _files(settings: Settings) -> Iterator[tuple[str, Path]]:
    if tls := settings.proxy.tls:
        yield "proxy.tls.cert", tls.cert
        if tls.client_ca:
            yield "proxy.tls.client_ca", tls.client_ca
    for name, node in settings.nodes.items():
        if node.ca_file:
            yield f"nodes.{name}.ca_file", node.ca_file
        if node.cert:
            yield f"nodes.{name}.cert", node.cert


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):  # OpenSSL, which reads more, has accepted the file
        return []


def _problem(found: x509.Certificate, now: datetime) -> str | None:
    if found.not_valid_after_utc < now:
        return f"expired at {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it"
    if found.not_valid_before_utc > now:
        return f"is not valid before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return None


def _name(found: x509.Certificate) -> str:
    return found.subject.rfc4514_string() or f"number {found.serial_number:x}"
