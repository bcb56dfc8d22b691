"""`[proxy.tls]`: the certificate of the listening address."""

from __future__ import annotations

from pydantic import Field

from proxy.config.types import ExpandedPath, SettingsTable


class TlsSettings(SettingsTable):
    """`[proxy.tls]`: clients connect by https; TLS 1.2 at least."""

    cert: ExpandedPath = Field(
        description="PEM file of the certificate, then its intermediate ones; a changed file is "
        "taken for new connections"
    )
    key: ExpandedPath = Field(
        description="PEM file of its key without a passphrase, readable by this user alone"
    )
    client_ca: ExpandedPath | None = Field(
        None,
        description="PEM file of CA certificates; clients need a certificate of one; "
        "unset: clients need none",
    )

    @property
    def files(self) -> tuple[ExpandedPath, ...]:
        return (self.cert, self.key, *([self.client_ca] if self.client_ca else []))
