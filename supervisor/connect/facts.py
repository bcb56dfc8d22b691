"""What a client is told of the running daemon. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEY_VARIABLE: Final = "CORRAL_API_KEY"
# Where clients want a key and the daemon needs none.
NO_KEY: Final = "none"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers chats.

    Attributes:
        context_tokens: Of one request; None where not known yet.
        sees_images: Whether it reads them.
    """

    name: str
    context_tokens: int | None = None
    sees_images: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The daemon.

    Attributes:
        url: Without a path.
        model: For most requests; one of `models`.
        small: For short requests, such as titles.
        needs_key: Clients find it in the variable CORRAL_API_KEY.
        certificate: PEM file to trust for https, where nobody else has signed it; else None.
    """

    url: str
    models: tuple[ServedModel, ...]
    model: ServedModel
    small: ServedModel
    needs_key: bool = False
    certificate: Path | None = None

    @property
    def api(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Places:
    """Where a user's settings are."""

    home: Path
    environ: Mapping[str, str]
    corral: Path  # the directory of corral.toml

    @property
    def config(self) -> Path:
        return self.named("XDG_CONFIG_HOME", self.home / ".config")

    def named(self, variable: str, default: Path) -> Path:
        """Return the directory that a variable names. An empty variable names none."""
        return Path(value) if (value := self.environ.get(variable)) else default
