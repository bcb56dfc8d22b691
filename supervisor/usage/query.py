"""Sums of usage by key, model, day or month. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

from supervisor.usage.usage import Account, Totals, Usage

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
    """Which usage is asked for.

    Attributes:
        by: What each sum is of; None: of a key and a model.
        since: The first day, as 2026-11-22; None: all that is known.
        key: Only that of this key.
        model: Only that of this model.
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
    """Return the first day that a text means: a date, a month, or days as in 7d.

    Raises:
        ValueError: It is none of these.
    """
    if text is None:
        return None
    try:
        if days := _DAYS.fullmatch(text):
            return (today - timedelta(days=int(days[1]))).isoformat()
        return date.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text).isoformat()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no day") from error


def tokens_by_key(totals: Totals, day: str) -> dict[str, int]:
    """Tokens of prompts and answers of one day."""
    found = groups(totals, Query("key", day))
    return {one.names[0]: one.usage.total_tokens for one in found}


def groups(totals: Totals, query: Query) -> list[Group]:
    """The sums, ordered by name."""
    sums: dict[tuple[str, ...], Usage] = {}
    for account, usage in totals.items():
        if query.takes(account):
            names = tuple(_NAMES[name](account) for name in query.names)
            sums[names] = sums.get(names, Usage()) + usage
    return [Group(names, usage) for names, usage in sorted(sums.items())]


def members(names: Sequence[str], group: Group) -> dict[str, Any]:
    """A sum as JSON members."""
    one = group.usage
    return {
        **dict(zip(names, group.names, strict=True)),
        "requests": one.requests,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "generated_tokens": one.generated_tokens,
        "total_tokens": one.total_tokens,
        "slot_seconds": round(one.slot_s, 3),
        "cpu_seconds": round(one.cpu_s, 3),
    }
