"""What models gave up after their engines ran out of memory. It ends with the daemon."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.flags.plan import ModelEntry
from supervisor.flags.setting import CORRAL, Setting, Settings
from supervisor.memory.reduction import Kind, Reduction


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Of one model: the settings that it was planned with, and what was given up of them."""

    entry: ModelEntry
    settings: Settings
    kinds: tuple[Kind, ...]
    was_short: bool  # whether so little was free that this explains the failure


class Reductions:
    def __init__(self) -> None:
        self._by_model: dict[str, _Reduced] = {}

    def of(self, entry: ModelEntry) -> Settings:
        """Return the values that replace planned ones; none once the settings have changed."""
        found = self._found(entry)
        return found.settings if found else {}

    def kinds(self, entry: ModelEntry) -> tuple[Kind, ...]:
        """Return what was tried, in this order."""
        found = self._found(entry)
        return found.kinds if found else ()

    def was_short(self, entry: ModelEntry) -> bool:
        """Whether it gave up something because less memory was free than it needed."""
        found = self._found(entry)
        return found is not None and found.was_short

    def add(self, entry: ModelEntry, one: Reduction, reason: str, *, was_short: bool) -> None:
        settings = {key: Setting(value, CORRAL, reason) for key, value in one.flags.items()}
        kinds = (*self.kinds(entry), one.kind)
        self._by_model[entry.name] = _Reduced(
            entry, {**self.of(entry), **settings}, kinds, was_short
        )

    def set(self, entry: ModelEntry, settings: Settings) -> None:
        """Note what another process gave up."""
        self._by_model[entry.name] = _Reduced(entry, settings, (), was_short=False)

    def forget(self, model: str) -> None:
        self._by_model.pop(model, None)

    def _found(self, entry: ModelEntry) -> _Reduced | None:
        found = self._by_model.get(entry.name)
        return found if found and found.entry == entry else None
