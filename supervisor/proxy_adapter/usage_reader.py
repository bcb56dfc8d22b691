"""What `/corral/v1/usage` and `/metrics` show of usage (proxy.usage_endpoint.UsageReader)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from proxy.errors import BadRequest, Unavailable, quoted
from proxy.usage_endpoint import UsageQuestion
from supervisor.usage.files import read_all
from supervisor.usage.query import By, Query, first_day, groups, members
from supervisor.usage.usage import Totals, Usage

_LABELS: Final = ("client", "model")
_AGE_MAX_S: Final = 1.0


class UsageReaderAdapter:
    """Reads the files in a thread, and not more often than once a second."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = asyncio.Lock()
        self._totals: Totals = {}
        self._read_at_s = float("-inf")

    async def usage(self, question: UsageQuestion, /) -> Sequence[Mapping[str, Any]]:
        query = _query(question)
        try:
            async with self._turn:
                found = await self._read()
        except OSError as error:
            raise Unavailable(f"usage cannot be read: {error.strerror}") from error
        return [members(query.names, one) for one in groups(found, query)]

    async def _read(self) -> Totals:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_at_s > _AGE_MAX_S:
            self._totals = await asyncio.to_thread(read_all, self._root)
            self._read_at_s = asyncio.get_running_loop().time()
        return self._totals


def _query(question: UsageQuestion) -> Query:
    if question.by not in {None, *get_args(By)}:
        choices = ", ".join(get_args(By))
        raise BadRequest(f"by={quoted(question.by or '')} is unknown; expected {choices}")
    today = datetime.now().astimezone().date()
    try:
        since = first_day(question.since, today)
    except ValueError as error:
        raise BadRequest(f"since: {error}; write 2026-11-22, 2026-11 or 7d") from error
    by: Any = question.by
    return Query(by, since, question.key, question.model)


def usage_metrics(since_start: Mapping[tuple[str, str], Usage]) -> Iterator[Metric]:
    """Yield counters since the start of the daemon, by key and model."""
    requests = _family("requests", "Requests that an instance got, by API key.")
    tokens = _family("tokens", "Tokens by API key: prompt, cached or generated.", "kind")
    slot_s = _family("slot_seconds", "How long requests of an API key held slots.")
    cpu_s = _family("cpu_seconds", "Processor time of engines by API key.")
    for labels, one in sorted(since_start.items()):
        requests.add_metric(labels, one.requests)
        slot_s.add_metric(labels, one.slot_s)
        cpu_s.add_metric(labels, one.cpu_s)
        tokens.add_metric((*labels, "prompt"), one.prompt_tokens)
        tokens.add_metric((*labels, "cached"), one.cached_tokens)
        tokens.add_metric((*labels, "generated"), one.generated_tokens)
    yield from (requests, tokens, slot_s, cpu_s)


def _family(name: str, text: str, *more: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"corral_client_{name}", text, labels=(*_LABELS, *more))
