"""TLS of `corral batch` with the daemon of this machine."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied, SettingsInvalid

CERT_VARIABLE: Final = "CORRAL_CLIENT_CERT"
_END: Final = "-----END CERTIFICATE-----"


def pinned(cert: Path) -> ssl.SSLContext:
    """Trust the daemon's own certificate alone, whatever names it has.

    Its control socket has named the file, so no CA is needed, and 127.0.0.1 need not be a name.

    Raises:
        AccessDenied: The file cannot be read.
        SettingsInvalid: It has no certificate, or the client certificate cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        text = cert.read_text("ascii", "ignore")
        context.load_verify_locations(cadata=text.partition(_END)[0] + _END + "\n")
    except (ssl.SSLError, ValueError) as error:
        raise SettingsInvalid(f"the daemon's certificate {cert} cannot be used: {error}") from error
    except OSError as error:
        reason = f"the daemon's certificate {cert} cannot be read: {error.strerror}"
        raise AccessDenied(reason) from error
    if own := os.environ.get(CERT_VARIABLE):
        _show(context, own)
    return context


def raise_if_refused(error: Exception) -> None:
    """Raises AccessDenied if TLS with the daemon has failed, and not only the connection."""
    if "[SSL" in str(error) or "CERTIFICATE" in str(error):
        raise AccessDenied(
            f"no TLS connection with the daemon: {error}",
            hint=f"where it demands a client certificate, set {CERT_VARIABLE} to a PEM file with "
            "one and its key; corral config check shows whether its own has expired",
        ) from error


def _show(context: ssl.SSLContext, own: str) -> None:
    try:
        context.load_cert_chain(own, password="")
    except OSError as error:  # also an ssl.SSLError
        raise SettingsInvalid(
            f"{CERT_VARIABLE}: {own} cannot be used: {error.strerror or error}",
            hint="it names a PEM file with a client certificate and its key, without a passphrase",
        ) from error
