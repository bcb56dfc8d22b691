import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S

from supervisor.engine.log_file import LINE_MAX_BYTES, LogFile, follow, tail

OFTEN_S = 0.001


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"{n}\n" for n in range(50_000)))
    assert tail(path, 3) == ("49997", "49998", "49999")
    assert len(tail(path, 40_000)) == 40_000


@pytest.mark.parametrize(("text", "lines"), [("", ()), ("a", ("a",)), ("a\n\n", ("a", ""))])
def test_tail_of_a_short_log_is_the_whole_log(
    tmp_path: Path, text: str, lines: tuple[str, ...]
) -> None:
    (tmp_path / "a.log").write_text(text)
    assert tail(tmp_path / "a.log", 9) == lines


def test_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "a.log", 9) == ()


def test_tail_of_zero_lines_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("a\nb\n")
    assert tail(tmp_path / "a.log", 0) == ()


def test_tail_cuts_a_huge_line(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x" * 1024**2 + "\nlast\n")
    huge, last = tail(tmp_path / "a.log", 2)
    assert (len(huge), last) == (LINE_MAX_BYTES, "last")


async def test_follow_gives_each_new_line_across_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    heard: list[str] = []
    with LogFile(path, size_bytes=40) as log:
        async with hearing(path, log.write, b"line 0\n") as lines:
            async for line in lines:
                heard.append(line)
                if len(heard) == 20:
                    break
                log.write(f"line {len(heard)}\n".encode())
    assert heard == [f"line {number}" for number in range(20)]
    assert (tmp_path / "a.log.1").exists()


async def test_follow_starts_with_the_last_lines_and_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\nlast\nunfin")
    async with aclosing(follow(path, 2, interval_s=OFTEN_S)) as lines:
        assert await anext(lines) == "last"
        with path.open("a") as file:
            file.write("ished\nnew\n")
        assert [await anext(lines), await anext(lines)] == ["unfinished", "new"]


async def test_follow_waits_for_a_missing_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    async with hearing(path, path.write_bytes, b"") as lines:
        following = anext(lines)
        loop = asyncio.get_running_loop()
        loop.call_later(50 * OFTEN_S, path.write_bytes, b"hello\n")
        assert await following == "hello"


async def test_follow_continues_after_a_log_was_deleted_and_recreated(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch()

    def remove_and_make_again(line: bytes) -> None:
        path.unlink()
        asyncio.get_running_loop().call_later(20 * OFTEN_S, path.write_bytes, line)

    async with hearing(path, remove_and_make_again, b"new\n") as lines:
        assert await anext(lines) == "new"


@asynccontextmanager
async def hearing(
    path: Path, write: Callable[[bytes], object], first: bytes
) -> AsyncIterator[AsyncGenerator[str, None]]:
    """Follow a log to which something is written as soon as the follower has begun."""
    async with asyncio.timeout(PATIENCE_S), aclosing(follow(path, interval_s=OFTEN_S)) as lines:
        asyncio.get_running_loop().call_soon(write, first)
        yield lines
