"""Usage of engines by key and model, and its sums by key, model, day or month. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

# No API key has such a name.
NO_KEY: Final = "(no key)"
OWN_WORK: Final = "(warming, checks)"
OTHERS: Final = "(others)"

_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over requests.

    Attributes:
        prompt_tokens: Computed tokens, without those from a cache.
        cached_tokens: Tokens from a cache, whose prefill was saved.
        slot_s: Time for which requests held slots, summed over slots.
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
    """The owner of usage; `day` is a local date, as 2026-11-22."""

    day: str
    key: str
    model: str


Totals = Mapping[Account, Usage]


def add(totals: dict[Account, Usage], account: Account, usage: Usage, rows_max: int) -> None:
    """Add to an account; above `rows_max` accounts, add to the account of others."""
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
    """Read a row; None if it is incomplete or invalid."""
    match values:
        case [str(day), str(key), str(model), *figures] if _are_figures(figures):
            return Account(day, key, model), Usage(*figures)
    return None


def from_rows(rows: Iterable[Any]) -> Iterable[tuple[Account, Usage]]:
    return filter(None, map(from_row, rows))


def _are_figures(figures: list[Any]) -> bool:
    return len(figures) == _FIGURES and all(type(figure) in _NUMBERS for figure in figures)


_NONE: Final = Usage()
_FIGURES: Final = 6


By = Literal["key", "model", "day", "month"]

_DAYS: Final = re.compile(r"(\d{1,5})d")
_MONTH: Final = re.compile(r"\d{4}-\d\d")
_NAMES: Final[Mapping[str, Callable[[Account], str]]] = {
    "key": lambda account: account.key,
    "model": lambda account: account.model,
    "day": lambda account: account.day,
    "month": lambda account: account.day[:7],
}


@dataclass(frozen=True, slots=True)
class Query:
    """A question about usage: by what to sum, from which day, for which key and model; None: all.

    Without `by`, sums are for key and model together.
    """

    by: By | None = None
    since: str | None = None
    key: str | None = None
    model: str | None = None

    @property
    def names(self) -> Sequence[str]:
        return (self.by,) if self.by else ("key", "model")

    def takes(self, account: Account) -> bool:
        is_late = self.since is None or account.day >= self.since
        return is_late and self.key in {None, account.key} and self.model in {None, account.model}


@dataclass(frozen=True, slots=True)
class Group:
    """Usage of the accounts that have these names, in the order of `Query.names`."""

    names: tuple[str, ...]
    usage: Usage


def first_day(text: str | None, today: date) -> str | None:
    """Return the first day of a date, a month, or days as in 7d; raises ValueError."""
    if text is None:
        return None
    try:
        if days := _DAYS.fullmatch(text):
            return (today - timedelta(days=int(days[1]))).isoformat()
        return date.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text).isoformat()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no day") from error


def tokens_by_key(totals: Totals, day: str) -> dict[str, int]:
    found = groups(totals, Query("key", day))
    return {group.names[0]: group.usage.total_tokens for group in found}


def groups(totals: Totals, query: Query) -> list[Group]:
    """Return the sums, ordered by name."""
    sums: dict[tuple[str, ...], Usage] = {}
    for account, usage in totals.items():
        if query.takes(account):
            names = tuple(_NAMES[name](account) for name in query.names)
            sums[names] = sums.get(names, Usage()) + usage
    return [Group(names, usage) for names, usage in sorted(sums.items())]


def members(names: Sequence[str], group: Group) -> dict[str, Any]:
    """Return a sum as JSON members."""
    usage = group.usage
    return {
        **dict(zip(names, group.names, strict=True)),
        "requests": usage.requests,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated_tokens": usage.generated_tokens,
        "total_tokens": usage.total_tokens,
        "slot_seconds": round(usage.slot_s, 3),
        "cpu_seconds": round(usage.cpu_s, 3),
    }
