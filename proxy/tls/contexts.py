"""TLS contexts from PEM files: of the listening address, and of the connections to a node."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, NoReturn

from proxy.auth.secret_file import read_private, read_public
from proxy.errors import ConfigError
from proxy.tls.handshake import Handshake
from proxy.tls_config import TlsSettings

# The bundles of operating systems have 200 to 500 KiB.
_FILE_MAX_BYTES: Final = 4 * 1024**2
_CERT_HINT: Final = "it must be a PEM file: -----BEGIN CERTIFICATE-----"
_KEY_HINT: Final = "it must be a PEM file with one key and no passphrase"
_MISSING: Final = "correct its path, or unset it"


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """Raises ConfigError if a file is missing, wrong, or the key is open to others."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.sslobject_class = Handshake
    _load_certificate(context, settings.cert, settings.key)
    if settings.client_ca is not None:
        _load_authorities(context, settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca_file: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Without `ca_file`, the system's CAs are trusted. Raises ConfigError as `server_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file is not None:
        _load_authorities(context, ca_file)
    else:
        context.load_default_certs()
    if cert is not None and key is not None:
        _load_certificate(context, cert, key)
    return context


def _load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _check_certificate(cert)
    text, _ = read_private(
        key, "the TLS key file", _FILE_MAX_BYTES, missing=_MISSING, wrong=_KEY_HINT
    )
    if b"PRIVATE KEY-----" not in text:
        raise ConfigError(f"the TLS key file {key} has no key", _KEY_HINT)

    def refuse_passphrase() -> NoReturn:  # OpenSSL would ask for it on the terminal
        raise ConfigError(f"the TLS key {key} has a passphrase", _KEY_HINT)

    try:
        context.load_cert_chain(cert, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"the TLS key {key} does not belong to the certificate {cert}"
            raise ConfigError(reason, "name the key that the certificate was made for") from error
        reason = f"the certificate {cert} and its key {key} cannot be used: {_reason(error)}"
        raise ConfigError(reason, _CERT_HINT) from error
    except OSError as error:  # a file was replaced meanwhile
        raise ConfigError(f"the certificate {cert}: {error.strerror}", _MISSING) from error


def _check_certificate(path: Path) -> None:
    """Read the file, whose content OpenSSL explains badly."""
    text = read_public(path, "the certificate file", _FILE_MAX_BYTES, _MISSING, _CERT_HINT)
    if b"-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(f"the certificate file {path} has no certificate", _CERT_HINT)


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    text = read_public(path, "the file of CA certificates", _FILE_MAX_BYTES, _MISSING, _CERT_HINT)
    try:
        context.load_verify_locations(cadata=text.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        reason = f"the file of CA certificates {path} cannot be used: {_reason(error)}"
        raise ConfigError(reason, _CERT_HINT) from error


def _reason(error: Exception) -> str:
    known = error.reason if isinstance(error, ssl.SSLError) else None
    return known.replace("_", " ").lower() if known else str(error)
