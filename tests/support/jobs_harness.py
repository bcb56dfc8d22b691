"""Jobs on a real database, with answers that a test gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from support.proxy_harness import FakeLoader

from proxy.auth.api_keys import ApiKeys
from proxy.batches import rows
from proxy.batches.database import Database
from proxy.batches.line_runner import JobReporter, Tools
from proxy.batches.own_requests import OwnAnswer, OwnRequests
from proxy.batches.records import Batch, StoredFile
from proxy.batches.runner import Job, Places
from proxy.observe.record import discard
from proxy.request.models import ModelNames
from proxy.router.router import Router
from proxy.settings import JobSettings, ProxySettings

CHAT = "/v1/chat/completions"
OK = OwnAnswer(200, b'{"id": "1"}')

Answer = Callable[[Mapping[str, Any]], Awaitable[OwnAnswer]]


def request(custom_id: str, **members: Any) -> bytes:
    """A line of a file; members of its body."""
    body = {"model": "chat", "messages": [], **members}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line).encode() + b"\n"


def failure(status: int, code: str = "code") -> OwnAnswer:
    return OwnAnswer(status, json.dumps({"error": {"code": code, "message": "no"}}).encode())


async def say_ok(_: Mapping[str, Any]) -> OwnAnswer:
    return OK


class FakeRequests:
    """Answers as `say` does; `asked` are the bodies in order."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.clients: set[str] = set()
        self.names: list[ModelNames] = []
        self.say: Answer = say_ok
        self.working = 0
        self.most = 0

    async def answer(
        self,
        _path: str,
        members: Mapping[str, Any],
        *,
        client: str,
        names: ModelNames,
        request_id: str,
    ) -> OwnAnswer:
        assert request_id.startswith("req_")
        self.asked.append(members)
        self.clients.add(client)
        self.names.append(names)
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            return await self.say(members)
        finally:
            self.working -= 1


class JobsHarness:
    """One database and the collaborators of a job; `reopen` as a new process does."""

    def __init__(self, directory: Path, keys_file: Path | None = None) -> None:
        self.path = directory / "jobs" / "jobs.sqlite"
        self.now = 1_000_000
        self.slept_s: list[float] = []
        self.emitted: list[tuple[str, dict[str, Any]]] = []
        self.loader = FakeLoader(Router())
        self.requests = FakeRequests()
        self._ticks = 0.0
        self.keys = ApiKeys(keys_file, discard, clock=self._tick)
        self.configure()

    def configure(self, max_bytes: int = 2**30, **changes: Any) -> None:
        """Open the database with other settings."""
        self.settings = JobSettings(**changes)
        self.reporter = JobReporter(self._emit)
        self.database = Database(self.path, max_bytes, self.reporter.note_pause, retry_first_s=0.01)
        self.tools = Tools(
            database=self.database,
            requests=cast("OwnRequests", self.requests),
            keys=self.keys,
            loader=self.loader,
            settings=self.settings,
            reporter=self.reporter,
            now=lambda: self.now,
            sleep=self._sleep,
        )
        self.places = Places(lambda _: self.settings.max_in_flight)

    async def reopen(self, max_bytes: int = 2**30) -> None:
        await self.close()
        self.configure(max_bytes)

    async def close(self) -> None:
        await asyncio.to_thread(self.database.close, wait=True)

    async def file(self, lines: Sequence[bytes], owner: str = "") -> StoredFile:
        key = await self.database.run(
            rows.begin_file, (f"file-{owner}", owner, "a.jsonl", self.now)
        )
        await self.database.run(rows.add_lines, key, 1, lines)
        size_bytes = sum(map(len, lines))
        await self.database.run(rows.finish_file, key, size_bytes, self.now + 10**6)
        return await self.database.run(rows.find_file, owner, f"file-{owner}")

    async def batch(self, *lines: bytes, owner: str = "") -> Batch:
        file = await self.file(lines, owner)
        return await self.database.run(
            rows.create_batch, owner, CHAT, file.id, None, None, now=self.now, max_jobs=9
        )

    def job(self, batch: Batch) -> Job:
        return Job(batch, self.places, self.tools, ProxySettings())

    async def run(self, batch: Batch) -> Batch:
        """Run a batch to its end."""
        await self.job(batch).run()
        return await self.state(batch)

    async def state(self, batch: Batch) -> Batch:
        return await self.database.run(rows.batch_of_id, batch.id)

    async def lines(self, file_id: str | None, owner: str = "") -> list[dict[str, Any]]:
        """The lines of a file of results."""
        if file_id is None:
            return []
        file = await self.database.run(rows.find_file, owner, file_id)
        text = b"".join(line.data for line in await self.database.run(rows.file_content, file, 0))
        assert len(text) == file.size_bytes
        return [json.loads(line) for line in text.splitlines()]

    def _tick(self) -> float:
        self._ticks += 10
        return self._ticks

    async def _sleep(self, wait_s: float) -> None:
        self.slept_s.append(wait_s)
        await asyncio.sleep(0)

    def _emit(self, name: str, /, **fields: Any) -> None:
        self.emitted.append((name, fields))
