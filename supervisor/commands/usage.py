"""`corral usage`: who used how much; works without a daemon."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, duration, table
from supervisor.usage.files import read_all
from supervisor.usage.query import Group, Query, first_day, groups, members
from supervisor.usage.usage import Usage

_HEAD = ("REQUESTS", "PROMPT", "CACHED", "SAVED", "GENERATED", "SLOT TIME", "CPU TIME")


def usage(query: Query, *, as_csv: bool) -> CommandResult:
    """Show tokens and seconds; `query.since` may also be a month, or days as in 7d."""
    today = datetime.now().astimezone().date()
    try:
        query = replace(query, since=first_day(query.since, today))
    except ValueError as error:
        raise SettingsInvalid(
            f"--since: {error}", hint="write 2026-11-22, 2026-11 or 7d"
        ) from error
    root = directories().usage
    try:
        found = groups(read_all(root), query)
    except OSError as error:
        raise AccessDenied(f"cannot read {error.filename or root}: {error.strerror}") from error
    data = [members(query.names, one) for one in found]
    if as_csv:
        return CommandResult(data, _csv(query.names, data))
    return CommandResult(data, _text(query.names, found) if found else "no usage is recorded")


def _text(names: Sequence[str], found: Sequence[Group]) -> str:
    rows = [(*one.names, *_figures(one.usage)) for one in found]
    if len(found) > 1:
        total = sum((one.usage for one in found), Usage())
        rows.append(("total", *[""] * (len(names) - 1), *_figures(total)))
    return table((*(name.upper() for name in names), *_HEAD), rows)


def _figures(one: Usage) -> tuple[str, ...]:
    prompt = one.prompt_tokens + one.cached_tokens
    return (
        str(one.requests),
        str(one.prompt_tokens),
        str(one.cached_tokens),
        f"{one.cached_tokens / prompt:.0%}" if prompt else "-",
        str(one.generated_tokens),
        duration(one.slot_s),
        duration(one.cpu_s),
    )


def _csv(names: Sequence[str], data: Sequence[dict[str, object]]) -> str:
    text = io.StringIO()
    fields = [*names, *(name for name in members((), Group((), Usage())))]
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(data)
    return text.getvalue().rstrip("\n")
