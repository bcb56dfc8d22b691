"""What was used, and who used it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# No API key has such a name.
NO_KEY: Final = "(no key)"
OWN_WORK: Final = "(warming, checks)"
OTHERS: Final = "(others)"

_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over requests.

    Attributes:
        prompt_tokens: Computed, without those taken from a cache.
        cached_tokens: Taken from a cache: the prefill that was saved.
        slot_s: Seconds in which requests held slots, summed over slots.
        cpu_s: Processor time of engines.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    slot_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.slot_s + other.slot_s,
            self.cpu_s + other.cpu_s,
        )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.cached_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True, order=True)
class Account:
    """Whose usage it is; `day` is a date of this machine's time zone, as 2026-11-22."""

    day: str
    key: str
    model: str


Totals = Mapping[Account, Usage]


def add(totals: dict[Account, Usage], account: Account, usage: Usage, rows_max: int) -> None:
    """Add to an account; to that of others where there are too many."""
    if account not in totals and len(totals) >= rows_max:
        account = Account(account.day, OTHERS, OTHERS)
    totals[account] = totals.get(account, _NONE) + usage


def row(account: Account, usage: Usage) -> list[str | int | float]:
    return [
        account.day,
        account.key,
        account.model,
        usage.requests,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.generated_tokens,
        round(usage.slot_s, 3),
        round(usage.cpu_s, 3),
    ]


def from_row(values: Any) -> tuple[Account, Usage] | None:
    """Read a row; None for one that is cut off or invalid."""
    match values:
        case [str(day), str(key), str(model), *figures] if _are_figures(figures):
            return Account(day, key, model), Usage(*figures)
    return None


def from_rows(rows: Iterable[Any]) -> Iterable[tuple[Account, Usage]]:
    return filter(None, map(from_row, rows))


def _are_figures(figures: list[Any]) -> bool:
    return len(figures) == _FIGURES and all(type(one) in _NUMBERS for one in figures)


_NONE: Final = Usage()
_FIGURES: Final = 6
