"""A TLS context that follows its files.

A renewed certificate is for new connections; open ones keep theirs. While the files are broken, the
context stays as it was.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from proxy.access_log import Emit
from proxy.auth.keys_file import FileVersion, file_version
from proxy.errors import ConfigError
from proxy.tls.handshake import Handshake

_RECHECK_S: Final = 1.0

_Versions = tuple[FileVersion | None, ...]


class RenewedContext:
    """Looks at its files at most once a second, for a new connection. Raises ConfigError."""

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
        self._versions = self._found()
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
        """Follow other files from now on; `context` was made of them."""
        self._files, self._make, self._context = files, make, context
        self._versions = self._found()
        self._broken = self._reported = None

    def renew(self) -> None:
        """Read the files again where they have changed; blocks for some milliseconds."""
        self._checked_at_s = self._clock()
        versions = self._found()
        if versions == self._versions:
            return
        try:
            self._context, self._versions = self._make(), versions
        except ConfigError as error:
            self._note_broken(versions, error)

    def _note_broken(self, versions: _Versions, error: ConfigError) -> None:
        """Report it the second time: certificate and key are written one after the other."""
        if versions == self._broken and versions != self._reported:
            self._reported = versions
            reason = f"the TLS certificate is unchanged: {error.message}"
            self._emit("settings.rejected", reason=reason)
        self._broken = versions

    def _found(self) -> _Versions:
        return tuple(file_version(path) for path in self._files)


class ListenerContext(ssl.SSLContext):
    """For listening sockets: each handshake uses the current context."""

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
