"""All accounts together are what an engine counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.requests import upstream

from proxy.router.reports import SlotUse, Tokens
from supervisor.records.usage import OWN_WORK, Usage
from supervisor.records.usage_files import Journal, read_all
from supervisor.records.usage_recorder import UsageRecorder, share_tokens


class Engine:
    """One engine with figures that a test sets."""

    def __init__(self) -> None:
        self.process = 1
        self.used_s = 0.0
        self.tokens: Tokens | None = Tokens()

    def ready(self) -> Iterator[tuple[str, str, int]]:
        yield "chat.0", "chat", self.process

    def pid(self, _instance: str, /) -> int | None:
        return self.process

    def cpu_s(self, _pid: int, /) -> float | None:
        return self.used_s

    async def count_tokens(self, _instance: str, /) -> Tokens | None:
        return self.tokens


class Recorded:
    def __init__(self, root: Path, *, is_on: bool = True) -> None:
        self.root = root
        self.engine = Engine()
        self.warnings: list[dict[str, Any]] = []
        self.journal = Journal(root)
        self.recorder = UsageRecorder(
            self.journal, self.engine, self._warn, is_on=lambda: is_on, has_keys=True
        )
        self._lease = 0

    def _warn(self, _name: str, /, **fields: object) -> None:
        self.warnings.append(fields)

    def open(self) -> None:
        self.journal.begin(*self.journal.open_next())

    def answer(
        self, key: str, tokens: Tokens, *, is_exact: bool = True, is_cut_off: bool = False
    ) -> None:
        self._lease += 1
        self.recorder.slots_taken(self._lease, upstream("chat.0"), 1)
        self.recorder.slots_freed(
            self._lease, SlotUse(key, "chat", "chat.0", tokens, 2.0, is_exact, is_cut_off)
        )

    def usage(self) -> dict[str, Usage]:
        return {account.key: usage for account, usage in read_all(self.root).items()}

    def tokens(self) -> dict[str, tuple[int, int, int]]:
        found = self.usage().items()
        return {
            key: (entry.prompt_tokens, entry.cached_tokens, entry.generated_tokens)
            for key, entry in found
        }


async def test_what_nobody_asked_for_has_an_account_of_its_own(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.open()
    recorded.answer("anna", Tokens(100, 20, 10))
    recorded.engine.tokens = Tokens(107, 20, 11)
    await recorded.recorder.settle()
    await recorded.recorder.settle()
    assert recorded.tokens() == {"anna": (100, 20, 10), OWN_WORK: (7, 0, 1)}


async def test_what_was_cut_off_gets_what_the_engine_counted_beyond_it(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.open()
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.answer("ben", Tokens(), is_exact=False)
    recorded.engine.tokens = Tokens(612, 0, 10)
    await recorded.recorder.settle()
    assert recorded.tokens() == {"anna": (100, 0, 10), "ben": (512, 0, 0)}


async def test_what_the_engine_did_not_count_is_taken_from_what_was_cut_off(
    tmp_path: Path,
) -> None:
    recorded = Recorded(tmp_path)
    recorded.open()
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.answer("ben", Tokens(50, 0, 30), is_cut_off=True)
    recorded.engine.tokens = Tokens(150, 2, 35)
    await recorded.recorder.settle()
    assert recorded.tokens() == {
        "anna": (100, 0, 10),
        "ben": (50, 0, 25),
        OWN_WORK: (0, 2, 0),
    }


async def test_an_engine_with_requests_is_not_read(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.open()
    recorded.recorder.slots_taken("first", upstream("chat.0"), 1)
    recorded.engine.tokens = Tokens(50, 0, 0)
    await recorded.recorder.settle()
    assert recorded.tokens() == {}


async def test_another_process_counts_from_nothing(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.open()
    recorded.answer("anna", Tokens(100, 0, 10))
    recorded.engine.process, recorded.engine.tokens = 2, Tokens(7, 0, 1)
    await recorded.recorder.settle()
    assert recorded.tokens()[OWN_WORK] == (7, 0, 1)


async def test_a_directory_that_cannot_be_used_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("no directory")
    recorded = Recorded(tmp_path / "usage")
    for _ in range(2):
        recorded.recorder._report(await recorded.recorder._fold())
    recorded.answer("anna", Tokens(1, 1, 1))
    assert len(recorded.warnings) == 1
    (tmp_path / "usage").unlink()
    recorded.open()
    assert recorded.tokens() == {"anna": (1, 1, 1)}


def test_nothing_is_recorded_where_that_is_off(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "usage", is_on=False)
    recorded.answer("anna", Tokens(1, 1, 1))
    assert recorded.journal.is_empty


def test_no_token_is_lost_when_some_are_shared_out() -> None:
    parts = share_tokens(Tokens(10, 1, 7), {"a": 1.0, "b": 1.0, "c": 0.0})
    assert sum(parts.values(), Tokens()) == Tokens(10, 1, 7)
    assert parts["a"].prompt == parts["b"].prompt == 5
    assert sum(share_tokens(Tokens(5, 0, 0), {"a": 0.0, "b": 0.0}).values(), Tokens()) == Tokens(
        5, 0, 0
    )
