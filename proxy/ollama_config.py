"""`[proxy.ollama]`: which addresses have Ollama's API."""

from __future__ import annotations

from pydantic import Field

from proxy.config.address import Address
from proxy.config.types import SettingsTable


class OllamaSettings(SettingsTable):
    """`[proxy.ollama]`: Ollama's API under /api, for clients that know no other."""

    enabled: bool = Field(
        default=False, description="whether the address of the proxy has Ollama's API as well"
    )
    listen: Address | None = Field(
        None,
        description="HOST:PORT of a second address, which has Ollama's API besides all others; "
        "Ollama's own is 127.0.0.1:11434",
    )
    manage_models: bool = Field(
        default=False,
        description="whether clients of Ollama's API may download and delete models "
        "(/api/pull, /api/delete)",
    )

    @property
    def is_on(self) -> bool:
        return self.enabled or self.listen is not None
