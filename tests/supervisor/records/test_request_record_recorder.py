"""The task that records requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S

from supervisor.events import EVENTS, Event, EventStream
from supervisor.records.request_sizes import RecordFiles, RequestRecorder

REQUEST: dict[str, Any] = {
    **dict.fromkeys(EVENTS["request.finished"][1]),
    "model": "chat",
    "kind": "chat",
    "status": 200,
    "duration_ms": 500.0,
    "prompt_tokens": 10,
    "cached_tokens": 0,
    "decoded_tokens": 7,
}


class _Recorder(RequestRecorder):
    def __init__(self, recording: Recording, is_recorded: Callable[[str], bool]) -> None:
        super().__init__(recording.files, recording.events, is_recorded, batch_s=0.01)
        self._attempts = recording.attempts

    def _report(self, failure: str | None) -> None:
        super()._report(failure)
        self._attempts.put_nowait(None)


class Recording:
    """A recorder on files below a directory."""

    def __init__(self, root: Path, is_recorded: Callable[[str], bool]) -> None:
        self.emitted: list[Event] = []
        self.attempts = asyncio.Queue[None]()
        self.events = EventStream(self.emitted.append)
        self.files = RecordFiles(root)
        self._recorder = _Recorder(self, is_recorded)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._recorder.serve())
            await asyncio.sleep(0)
            yield
            task.cancel()

    def finish(self, **changed: Any) -> None:
        self.events.emit("request.finished", **(REQUEST | changed))

    def warnings(self) -> list[str]:
        return [event.name for event in self.emitted if event.name == "requests.record_failed"]

    async def received(self) -> None:
        """Let the recorder take all events so far, which needs a turn of the loop for each."""
        for _ in self.emitted:
            await asyncio.sleep(0)

    async def written(self) -> None:
        """Wait until one more batch is written or lost."""
        async with asyncio.timeout(PATIENCE_S):
            await self.attempts.get()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "requests"


@pytest.fixture
def recording(root: Path) -> Recording:
    return Recording(root, lambda model: model == "chat")


async def test_a_batch_is_written_after_a_while(recording: Recording) -> None:
    async with recording.running():
        recording.finish()
        recording.finish()
        await recording.written()
        assert recording.files.counts() == {"chat": 2}


async def test_what_was_observed_is_written_at_the_end(recording: Recording) -> None:
    async with recording.running():
        recording.finish()
        await recording.received()
    assert recording.files.counts() == {"chat": 1}


async def test_only_chosen_models_and_finished_requests_are_recorded(
    recording: Recording, root: Path
) -> None:
    async with recording.running():
        recording.finish(model="../../escape")
        recording.finish(status=499)
        recording.events.emit("events.dropped", count=1)
        await recording.received()
    assert not root.exists()


async def test_a_full_disk_is_one_warning_until_a_write_succeeds(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True

    def append(files: RecordFiles, *given: Any) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        real(files, *given)

    real = RecordFiles.append
    monkeypatch.setattr(RecordFiles, "append", append)
    async with recording.running():
        for _ in range(3):
            recording.finish()
            await recording.written()
        assert len(recording.warnings()) == 1
        is_full = False
        recording.finish()
        await recording.written()
        is_full = True
        for _ in range(2):
            recording.finish()
            await recording.written()
        assert len(recording.warnings()) == 2
    assert recording.files.counts() == {"chat": 1}
