"""What the settings of another program become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.errors import SettingsInvalid
from supervisor.host.files import open_regular

_MAX_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """One model.

    Attributes:
        table: The keys of `[models.NAME]`.
        omitted: What is not taken over, with the reason, one sentence each.
        notes: What is to be known of what is taken over.
    """

    name: str
    table: Mapping[str, Any]
    omitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Converted:
    """All that a source says.

    Attributes:
        source: What was read, for people: `llama-swap file`.
        tables: Other tables of `corral.toml` by name.
        omitted: As of a model, but of no model that is taken over.
        notes: As of a model.
        keys: The API keys of its clients.
    """

    source: str
    models: tuple[ConvertedModel, ...]
    tables: Mapping[str, Any] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)

    def document(self) -> dict[str, Any]:
        """Return everything as `corral.toml` has it."""
        models = {model.name: dict(model.table) for model in self.models}
        return {**self.tables, **({"models": models} if models else {})}


def read_text(path: Path) -> str:
    """Read a file of settings.

    Raises:
        SettingsInvalid: It cannot be read, is larger than 1 MiB, or no text.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsInvalid(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise SettingsInvalid(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not text in UTF-8") from error


def without_equivalent(names: Iterable[object]) -> tuple[str, ...]:
    """Return a sentence for the keys of a source that mean nothing here."""
    found = ", ".join(sorted(map(str, names)))
    return (f"no equivalent: {found}",) if found else ()
