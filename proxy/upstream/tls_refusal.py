"""Why TLS with a node fails, for people who configure it. Pure."""

from __future__ import annotations

import ssl
from typing import Final

# X509_V_ERR_*: self-signed, or its issuer is not known. Source: OpenSSL, x509_vfy.h.
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21})

# By the reason of the error, which names the alert of the other side. Source: OpenSSL, sslerr.h.
_REASONS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "demands a client certificate; set its cert and key",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "refuses TLS with us; does it demand a client certificate "
    "(cert and key of the node)?",
    "TLSV1_ALERT_UNKNOWN_CA": "does not accept our client certificate: it does not know its CA",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "does not accept our client certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "does not accept our client certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "does not accept our client certificate: it is not for "
    "clients",
    "TLSV1_ALERT_PROTOCOL_VERSION": "offers no TLS from version 1.2 on",
    "UNSUPPORTED_PROTOCOL": "offers no TLS from version 1.2 on",
    "WRONG_VERSION_NUMBER": "does not speak TLS; its url may be http://",
}


def tls_refusal(error: Exception | None) -> str | None:
    """What the node does; None if the error is none of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "; set its ca_file" if error.verify_code in _UNKNOWN_ISSUER else ""
        return f"has a certificate that cannot be verified: {error.verify_message}{hint}"
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", f"fails in TLS: {error}")
    return None
