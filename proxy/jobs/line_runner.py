"""Computes one line until it has a result, and stores that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.batch.requests import OwnAnswer
from proxy.jobs import result_line, result_rows
from proxy.jobs.access import Access
from proxy.jobs.database import Database
from proxy.jobs.ids import new_id
from proxy.jobs.records import Batch, LineResult, StoredLine
from proxy.jobs.reporter import JobReporter
from proxy.jobs.request_line import RequestLine
from proxy.jobs.retry import retry_of
from proxy.jobs.settings import JobSettings
from proxy.models import ModelNames


class Requests(Protocol):
    """As `proxy.batch.requests.OwnRequests`."""

    async def answer(
        self,
        path: str,
        members: Mapping[str, Any],
        *,
        client: str,
        names: ModelNames,
        request_id: str,
    ) -> OwnAnswer: ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What a job needs of its surroundings; `now` is Unix time in whole seconds."""

    database: Database
    requests: Requests
    access: Access
    settings: JobSettings
    reporter: JobReporter
    now: Callable[[], int]
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


Pause = Callable[[float], Awaitable[object]]


class KeyGone(Exception):
    """The owner of a batch may use nothing any more."""


async def run_line(
    batch: Batch, line: StoredLine, request: RequestLine, tools: Tools, pause: Pause
) -> None:
    """Compute a line and store its result; cancelled, it has none.

    Args:
        batch: Its batch.
        line: As it is stored.
        request: As it was read.
        tools: To compute it.
        pause: Waits so many seconds while lines of other keys are computed.

    Raises:
        KeyGone: Its owner's key is gone.
    """
    request_id = new_id("req_")
    answer = await _final_answer(batch, request, request_id, tools, pause)
    result = result_line.answered(line.number, request.custom_id, request_id, answer)
    await store(batch, [result], tools)


async def store(batch: Batch, results: list[LineResult], tools: Tools) -> None:
    await tools.database.write_until_done(
        lambda connection: result_rows.store(connection, batch.key, results)
    )
    tools.reporter.stored(batch, [result.outcome for result in results])


async def _final_answer(
    batch: Batch, request: RequestLine, request_id: str, tools: Tools, pause: Pause
) -> OwnAnswer:
    failures = waits = 0
    while True:
        names = tools.access.names(batch.owner)
        if names is None:
            raise KeyGone
        answer = await tools.requests.answer(
            batch.endpoint,
            request.members,
            client=tools.access.client(batch.owner),
            names=names,
            request_id=request_id,
        )
        retry = retry_of(answer, failures, waits, tools.settings.max_attempts)
        if retry is None:
            return answer
        failures, waits = failures + retry.is_counted, waits + (not retry.is_counted)
        tools.reporter.waits(batch, result_line.message_of(answer.body))
        await (pause if retry.leaves_place else tools.sleep)(retry.wait_s)
