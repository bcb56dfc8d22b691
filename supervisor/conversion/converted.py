"""What the settings of another program become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """One model.

    Attributes:
        table: The keys of `[models.NAME]`.
        notes: What has no equivalent, one sentence each.
    """

    name: str
    table: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Converted:
    """All that a source says.

    Attributes:
        source: What was read, for people: `llama-swap file`.
        tables: Other tables of `corral.toml` by name.
        notes: What has no equivalent and belongs to no model that was taken over.
    """

    source: str
    models: tuple[ConvertedModel, ...]
    tables: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return everything as `corral.toml` has it."""
        models = {one.name: dict(one.table) for one in self.models}
        return {**self.tables, **({"models": models} if models else {})}


def without_equivalent(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note for the keys of a source that mean nothing here."""
    found = ", ".join(names)
    return (f"no equivalent: {found}",) if found else ()
