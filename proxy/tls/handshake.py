"""A handshake whose refusal the client gets to know."""

from __future__ import annotations

import ssl


class Handshake(ssl.SSLObject):
    """Sends OpenSSL's alert before a handshake fails.

    asyncio and uvloop close the connection without it: a client without a certificate would see an
    empty answer. They send what waits when the handshake wants to read; what the client sends then
    (or its silence, by the timeout) ends the connection.
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
