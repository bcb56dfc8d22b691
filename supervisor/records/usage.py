"""Usage of engines by day, key and model, as rows, and its sums."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from operator import add
from typing import Any, Final, Literal, NamedTuple, get_args

from proxy.observe.past import InternalWork

# No API key has such a name.
NO_KEY: Final = "(no key)"
# Older versions had no kinds of internal work.
INTERNAL_WORK: Final = frozenset({*get_args(InternalWork), "(warming, checks)"})
OTHERS: Final = "(others)"

# A local date, as 2026-11-22; the name of a key; the name of a model.
Account = tuple[str, str, str]


class Usage(NamedTuple):
    """Sums over requests."""

    requests: int = 0
    prompt_tokens: int = 0  # computed tokens, without those from a cache
    cached_tokens: int = 0  # tokens from a cache, whose prefill was saved
    generated_tokens: int = 0
    slot_s: float = 0.0  # time for which requests held slots, summed over slots
    cpu_s: float = 0.0  # processor time of engines

    def __add__(self, other: Usage) -> Usage:  # type: ignore[override]
        return Usage(*map(add, self, other))


USAGE_TABLE: Final = """
    CREATE TABLE IF NOT EXISTS usage (
        day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
        requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
        generated_tokens INTEGER NOT NULL, slot_s REAL NOT NULL, cpu_s REAL NOT NULL,
        PRIMARY KEY (day, key, model)
    ) WITHOUT ROWID
"""
_ADD: Final = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, key, model) DO UPDATE SET
        requests = requests + excluded.requests,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        cached_tokens = cached_tokens + excluded.cached_tokens,
        generated_tokens = generated_tokens + excluded.generated_tokens,
        slot_s = slot_s + excluded.slot_s,
        cpu_s = cpu_s + excluded.cpu_s
"""
# Some hundred keys and models each day.
_MONTH_ROWS_MAX: Final = 50_000
_MONTHS_MAX: Final = 60


def hold(held: dict[Account, Usage], account: Account, usage: Usage, accounts_max: int) -> None:
    """Add to an account; above `accounts_max` accounts, add to the account of others."""
    if account not in held and len(held) >= accounts_max:
        account = (account[0], OTHERS, OTHERS)
    held[account] = held.get(account, Usage()) + usage


def add_usage(connection: sqlite3.Connection, totals: Mapping[Account, Usage]) -> None:
    """Add to accounts; in a month that has too many, add to the account of others."""
    finding = "SELECT 1 FROM usage WHERE day = ? AND key = ? AND model = ?"
    counting = "SELECT count(*) FROM usage WHERE day BETWEEN ?1 AND ?1 || '-99'"
    counts: dict[str, int] = {}
    for account, usage in totals.items():
        day, key, model = account
        month = day[:7]
        if not connection.execute(finding, account).fetchone():
            if month not in counts:
                counts[month] = int(connection.execute(counting, (month,)).fetchone()[0])
            counts[month] += 1
            if counts[month] > _MONTH_ROWS_MAX:
                key = model = OTHERS
        connection.execute(_ADD, (day, key, model, *usage))


def prune_usage(connection: sqlite3.Connection) -> None:
    """Delete all but the latest months."""
    months = "SELECT DISTINCT substr(day, 1, 7) AS month FROM usage ORDER BY month DESC LIMIT ?"
    connection.execute(
        f"DELETE FROM usage WHERE day < (SELECT min(month) FROM ({months}))",  # noqa: S608 (ours)
        (_MONTHS_MAX,),
    )


By = Literal["key", "model", "day", "month"]
BY_DEFAULT: Final[Sequence[By]] = ("key", "model")

_DAYS: Final = re.compile(r"(\d{1,5})d")
_MONTH: Final = re.compile(r"\d{4}-\d\d")


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for the sums of accounts with equal `by`; None: from any day, of all keys and models."""

    by: Sequence[By] = BY_DEFAULT
    since: str | None = None
    key: str | None = None
    model: str | None = None


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


_SUM: Final = """
    SELECT {names}, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens,
        sum(cached_tokens) AS cached_tokens, sum(generated_tokens) AS generated_tokens,
        sum(prompt_tokens + cached_tokens + generated_tokens) AS total_tokens,
        round(sum(slot_s), 3) AS slot_seconds, round(sum(cpu_s), 3) AS cpu_seconds
    FROM (SELECT *, substr(day, 1, 7) AS month FROM usage)
    WHERE day >= coalesce(?1, '') AND key = coalesce(?2, key) AND model = coalesce(?3, model)
    GROUP BY {names} ORDER BY {names}
"""
# The figures of a sum.
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens", "total_tokens")
FIGURES: Final = (*_COUNTS, "slot_seconds", "cpu_seconds")


def sum_usage(connection: sqlite3.Connection, query: Query) -> list[dict[str, Any]]:
    """Return the sums as JSON members, ordered by name."""
    statement = _SUM.format(names=", ".join(query.by))
    found = connection.execute(statement, (query.since, query.key, query.model))
    return [dict(row) for row in found]
