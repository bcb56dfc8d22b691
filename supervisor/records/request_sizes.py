"""Sizes and pauses of served requests on disk, for `corral bench --workload yours`. No texts.

Each model has two files of JSON lines, the newer and the older, readable by this user alone. Files
are opened for each batch, so that a deleted one is created again. The settings have checked the
names of models.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.upstream.endpoint_kinds import EndpointKind
from supervisor.errors import AccessDenied
from supervisor.events import Event, EventStream, Listener
from supervisor.system.files import open_regular
from supervisor.system.paths import file_name, is_ours, make_private, name_of_file

_SECONDS_MAX: Final = 100 * 365 * 86_400
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=_SECONDS_MAX)]
_SignedSeconds = Annotated[float, Field(ge=-_SECONDS_MAX, le=_SECONDS_MAX)]


class RecordedRequest(BaseModel):
    """The sizes and pauses of one request.

    Attributes:
        kind: A name of `proxy.upstream.endpoint_kinds.EndpointKind` in lower case.
        conversation: A random number for each conversation; None if unknown.
        prompt_tokens: All tokens of the prompt, including cached ones.
        cached_tokens: Tokens of the prompt that came from the cache.
        generated_tokens: Tokens of the answer.
        after_any_s: From the beginning of the previous line's request to that of this one; below 0
            if this one began earlier and ended later. None for the first of a daemon.
        after_own_s: From the end of the conversation's previous request to the beginning of this
            one; None for its first.
        duration_s: From arrival to the end of the answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    conversation: _Count | None
    prompt_tokens: _Count
    cached_tokens: _Count
    generated_tokens: _Count
    after_any_s: _SignedSeconds | None
    after_own_s: _Seconds | None
    duration_s: _Seconds

    @property
    def line(self) -> bytes:
        return orjson.dumps(self.model_dump(), option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """Parse a line; None if it is incomplete or invalid."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            return None


# About 6 000 requests; a model has up to two such files.
_FILE_BYTES: Final = 1024**2
_NEWER, _OLDER = "requests.jsonl", "requests.1.jsonl"
_FLAGS: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)


class RecordFiles:
    """The files below `root`, which is made when something is recorded."""

    def __init__(self, root: Path, *, file_bytes: int = _FILE_BYTES) -> None:
        self._root = root
        self._file_bytes = file_bytes

    def append(self, model: str, requests: Sequence[RecordedRequest]) -> None:
        """Append requests of a model.

        Raises:
            OSError: Not all were written; an incomplete line is skipped when read.
            AccessDenied: The directory cannot be used.
        """
        newer, older = self._paths(model)
        make_private(self._root)
        make_private(newer.parent)
        descriptor = os.open(newer, _FLAGS, 0o600)
        try:
            written_bytes = os.fstat(descriptor).st_size
            # A full disk may have cut off the last line.
            _write(
                descriptor,
                b"\n" * bool(written_bytes) + b"".join(request.line for request in requests),
            )
            is_full = os.fstat(descriptor).st_size >= self._file_bytes
        finally:
            os.close(descriptor)
        if is_full:
            newer.replace(older)

    def requests(self, model: str) -> list[RecordedRequest]:
        """Return the recorded requests of a model, the oldest first; raises OSError."""
        newer, older = self._paths(model)
        return [*_read(older), *_read(newer)]

    def counts(self) -> dict[str, int]:
        """Return the number of requests of each model that has any."""
        counts = {model: len(self.requests(model)) for model in self._models()}
        return {model: count for model, count in counts.items() if count}

    def forget(self, model: str | None = None) -> dict[str, int]:
        """Delete the record of a model, or of all; return the number of requests of each."""
        counts = {
            name: len(self.requests(name)) for name in self._models() if model in {None, name}
        }
        for name in counts:
            for path in self._paths(name):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the daemon is writing to it again
                self._directory(name).rmdir()
        return counts

    def _paths(self, model: str) -> tuple[Path, Path]:
        directory = self._directory(model)
        return directory / _NEWER, directory / _OLDER

    def _directory(self, model: str) -> Path:
        return self._root / file_name(model)

    def _models(self) -> list[str]:
        if not is_ours(self._root):
            return []
        return sorted(name_of_file(path.name) for path in self._root.iterdir() if path.is_dir())


def _write(descriptor: int, lines: bytes) -> None:
    view = memoryview(lines)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(path: Path) -> Iterator[RecordedRequest]:
    try:
        with open_regular(path) as file:
            lines = file.read(2 * _FILE_BYTES).splitlines()
    except FileNotFoundError:
        return
    yield from filter(None, map(RecordedRequest.read, lines))


_CONVERSATIONS_MAX: Final = 4096
_NUMBER_BITS: Final = 48
_EMBEDDING: Final = EndpointKind.EMBED_OR_RERANK.name.lower()


class Observer:
    """Remembers when each conversation's last request ended; `new_number` is random."""

    def __init__(
        self, new_number: Callable[[], int] = lambda: secrets.randbits(_NUMBER_BITS)
    ) -> None:
        self._new_number = new_number
        # The recorded number of each conversation, and the end of its last request.
        self._conversations: OrderedDict[tuple[str, int], tuple[int, datetime]] = OrderedDict()
        self._began_at: dict[str, datetime] = {}

    def observe(self, at: datetime, fields: Mapping[str, Any]) -> RecordedRequest | None:
        """Return the record of a request that ended at `at`; None if it was not answered."""
        if fields["status"] != HTTPStatus.OK or fields["prompt_tokens"] is None:
            return None
        if fields["kind"] == _EMBEDDING:  # it cannot be replayed as a completion
            return None
        model, duration_s = fields["model"], fields["duration_ms"] / 1000
        began_at = at - timedelta(seconds=duration_s)
        before = self._began_at.get(model)
        self._began_at[model] = began_at
        number, after_own_s = self._conversation(model, fields["conversation"], began_at, at)
        return RecordedRequest(
            kind=fields["kind"],
            conversation=number,
            prompt_tokens=fields["prompt_tokens"] + fields["cached_tokens"],
            cached_tokens=fields["cached_tokens"],
            generated_tokens=fields["decoded_tokens"],
            after_any_s=_seconds(began_at - before) if before else None,
            after_own_s=after_own_s,
            duration_s=round(duration_s, 3),
        )

    def _conversation(
        self, model: str, number: int | None, began_at: datetime, ended_at: datetime
    ) -> tuple[int | None, float | None]:
        """Return a conversation's recorded number, and the pause since its last request."""
        if number is None:
            return None, None
        last = self._conversations.get((model, number))
        recorded, last_end_at = last or (self._new_number(), None)
        self._conversations[model, number] = recorded, ended_at
        self._conversations.move_to_end((model, number))
        if len(self._conversations) > _CONVERSATIONS_MAX:
            self._conversations.popitem(last=False)
        pause_s = max(0.0, _seconds(began_at - last_end_at)) if last_end_at else None
        return recorded, pause_s


def _seconds(duration: timedelta) -> float:
    return round(duration.total_seconds(), 3)


_BATCH_MAX: Final = 512

Batch = Mapping[str, Sequence[RecordedRequest]]


class RequestRecorder:
    """Records the requests of models for which `is_recorded` is true.

    Requests of the latest `batch_s` are lost if the daemon is killed.
    """

    def __init__(
        self,
        files: RecordFiles,
        events: EventStream,
        is_recorded: Callable[[str], bool],
        *,
        batch_s: float = 2.0,
    ) -> None:
        self._files = files
        self._events = events
        self._is_recorded = is_recorded
        self._batch_s = batch_s
        self._observer = Observer()
        self._has_failed = False

    async def serve(self) -> None:
        """Record until cancelled, and then write the rest."""
        with self._events.listen() as listener:
            while True:
                batch: dict[str, list[RecordedRequest]] = {}
                try:
                    await self._collect(listener, batch)
                except asyncio.CancelledError:
                    self._write(batch)
                    raise
                failure = await asyncio.to_thread(self._write, batch)
                self._report(failure)

    async def _collect(self, listener: Listener, batch: dict[str, list[RecordedRequest]]) -> None:
        """Wait for a request to record, then briefly for more."""
        while not batch:
            self._add(await listener.next(), batch)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._batch_s):
                for _ in range(_BATCH_MAX):
                    self._add(await listener.next(), batch)

    def _add(self, event: Event, batch: dict[str, list[RecordedRequest]]) -> None:
        if event.name != "request.finished":
            return
        model = str(event.fields["model"])
        if self._is_recorded(model) and (request := self._observer.observe(event.at, event.fields)):
            batch.setdefault(model, []).append(request)

    def _write(self, batch: Batch) -> str | None:
        """Write a batch; return why it was lost, or None."""
        try:
            for model, requests in batch.items():
                self._files.append(model, requests)
        except (OSError, AccessDenied) as error:
            return str(error)
        return None

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row."""
        if failure and not self._has_failed:
            self._events.emit("requests.record_failed", reason=failure)
        self._has_failed = failure is not None
