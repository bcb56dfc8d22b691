"""Makes TLS contexts from PEM files, for the listening address and for connections to nodes.

A context is renewed when its files change. New connections use the new certificate; open ones keep
the old one. While the files are invalid, the context stays as it was. A client gets an alert that
says why its handshake was refused.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from proxy.auth.keys_file import FileVersion, file_version, read_checked
from proxy.errors import ConfigError
from proxy.observe.record import Emit
from proxy.settings import TlsSettings


class Handshake(ssl.SSLObject):
    """Sends OpenSSL's alert before a handshake fails.

    asyncio and uvloop close the connection without sending it, so a client without a certificate
    would see an empty answer. They do send pending bytes when the handshake wants to read. The
    client's next bytes, or the timeout, then end the connection.
    """

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.outgoing.pending:
                raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, str(error)) from error
            raise


# The CA bundles of operating systems have 200 to 500 KiB.
_FILE_MAX_BYTES: Final = 4 * 1024**2
_CERT_HINT: Final = "it must be a PEM file: -----BEGIN CERTIFICATE-----"
_KEY_HINT: Final = "it must be a PEM file with one key and no passphrase"
_MISSING: Final = "correct its path, or unset it"


def server_context(settings: TlsSettings) -> ssl.SSLContext:
    """Raises ConfigError if a file is missing or invalid, or the key is open to others."""
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
    """Without `ca_file`, trust the system's CAs. Raises ConfigError as `server_context` does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file is not None:
        _load_authorities(context, ca_file)
    else:
        context.load_default_certs()
    if cert is not None and key is not None:
        _load_certificate(context, cert, key)
    return context


def _read_certificates(path: Path, what: str) -> bytes:
    hints = {"missing": _MISSING, "wrong": _CERT_HINT}
    return read_checked(path, what, _FILE_MAX_BYTES, is_private=False, **hints)[0]


def _load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    # OpenSSL explains a wrong file badly.
    certificate = _read_certificates(cert, "the certificate file")
    if b"-----BEGIN CERTIFICATE-----" not in certificate:
        raise ConfigError(f"the certificate file {cert} has no certificate", _CERT_HINT)
    text, _ = read_checked(
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


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    text = _read_certificates(path, "the file of CA certificates")
    try:
        context.load_verify_locations(cadata=text.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        reason = f"the file of CA certificates {path} cannot be used: {_reason(error)}"
        raise ConfigError(reason, _CERT_HINT) from error


def _reason(error: Exception) -> str:
    known = error.reason if isinstance(error, ssl.SSLError) else None
    return known.replace("_", " ").lower() if known else str(error)


_RECHECK_S: Final = 1.0

_Versions = tuple[FileVersion | None, ...]


class RenewedContext:
    """Checks its files at most once a second, when a connection is made. Raises ConfigError."""

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[], ssl.SSLContext],
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._make = make
        self._emit = emit
        self._clock = clock
        self._versions = self._file_versions()
        self._context = make()
        self._broken: _Versions | None = None
        self._reported: _Versions | None = None
        self._checked_at_s = clock()

    def current(self) -> ssl.SSLContext:
        if self._clock() - self._checked_at_s >= _RECHECK_S:
            self.renew()
        return self._context

    def follow(
        self, files: Sequence[Path], make: Callable[[], ssl.SSLContext], context: ssl.SSLContext
    ) -> None:
        """Follow other files from now on; `context` was made from them."""
        self._files, self._make, self._context = files, make, context
        self._versions = self._file_versions()
        self._broken = self._reported = None

    def renew(self) -> None:
        """Read the files again if they have changed; blocks for a few milliseconds."""
        self._checked_at_s = self._clock()
        versions = self._file_versions()
        if versions == self._versions:
            return
        try:
            self._context, self._versions = self._make(), versions
        except ConfigError as error:
            if versions == self._broken and versions != self._reported:
                self._reported = versions
                reason = f"the TLS certificate is unchanged: {error.message}"
                self._emit("settings.rejected", reason=reason)
            self._broken = versions

    def _file_versions(self) -> _Versions:
        return tuple(file_version(path) for path in self._files)


def renewed_server_context(settings: TlsSettings | None, emit: Emit) -> RenewedContext | None:
    """Return the context of a server's connections; None without TLS. Raises ConfigError."""
    if settings is None:
        return None
    return RenewedContext(settings.files, functools.partial(server_context, settings), emit)


class ListenerContext(ssl.SSLContext):
    """A context for listening sockets; each handshake uses the current `renewed` context."""

    renewed: RenewedContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,  # noqa: FBT001, FBT002 (ssl's)
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        wrapped = self.renewed.current().wrap_bio(
            incoming, outgoing, server_side, server_hostname, session
        )
        if isinstance(wrapped, Handshake):
            wrapped.outgoing = outgoing
        return wrapped


def listener_context(renewed: RenewedContext) -> ListenerContext:
    context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
    context.renewed = renewed
    return context
