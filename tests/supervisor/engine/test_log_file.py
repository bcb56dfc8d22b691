import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.engine.log_file import LINE_MAX_BYTES, LineSplitter, LogFile, LogRing
from supervisor.errors import AccessDenied


def test_the_ring_gives_the_last_lines_oldest_first() -> None:
    ring = LogRing()
    ring.feed(b"one\ntwo\nth")
    ring.feed(b"ree\n")
    assert ring.last_lines(2) == ("two", "three")


def test_an_unfinished_line_is_given_too() -> None:
    ring = LogRing()
    ring.feed(b"one\ntw")
    assert ring.last_lines(9) == ("one", "tw")


def test_an_empty_ring_has_no_lines() -> None:
    assert LogRing().last_lines(9) == ()


def test_a_line_of_a_megabyte_does_not_push_the_others_out() -> None:
    ring = LogRing(size_bytes=8192)
    ring.feed(b"before\n")
    for _ in range(16):
        ring.feed(b"x" * 65536)
    ring.feed(b"\nafter\n")
    before, cut, after = ring.last_lines(9)
    assert (before, after) == ("before", "after")
    assert len(cut) == LINE_MAX_BYTES


@given(st.lists(st.binary(max_size=3000)))
def test_the_ring_stays_bounded_with_any_input(chunks: list[bytes]) -> None:
    ring = LogRing(size_bytes=1000)
    for chunk in chunks:
        ring.feed(chunk)
    assert sum(len(line) for line in ring.last_lines(10_000)) <= 1000


def test_bytes_that_are_no_text_are_kept_legible() -> None:
    ring = LogRing()
    ring.feed(b"a\xffb\n")
    assert ring.last_lines(1) == ("a\ufffdb",)


def test_a_log_is_appended_to_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"one\n", b"two\n"):
        with LogFile(path) as log:
            log.write(text)
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_log_is_set_aside_and_the_oldest_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with LogFile(path, size_bytes=10, kept=2) as log:
        for number in range(5):
            log.write(b"%d234567\n" % number)
    kept = {file.name: file.read_bytes()[:1] for file in tmp_path.iterdir()}
    assert kept == {"a.log": b"4", "a.log.1": b"3", "a.log.2": b"2"}


def test_a_log_that_was_full_before_is_set_aside_at_the_first_write(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 20)
    with LogFile(path, size_bytes=10) as log:
        log.write(b"new\n")
    assert path.read_bytes() == b"new\n"


def test_a_log_is_never_written_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "precious")
    with pytest.raises(AccessDenied, match=r"a\.log"):
        LogFile(tmp_path / "a.log")
    assert not (tmp_path / "precious").exists()


def test_a_log_that_cannot_be_opened_is_told_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied) as caught:
        LogFile(tmp_path / "nowhere" / "a.log")
    assert caught.value.hint
    assert "CORRAL_LOG_DIR" in caught.value.hint


def test_a_full_disk_loses_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.log"
    with LogFile(path) as log:
        with monkeypatch.context() as full:
            full.setattr(os, "write", refuse)
            log.write(b"lost\n")
            log.write(b"lost too\n")
        log.write(b"back\n")
        log.write(b"again\n")
    text = path.read_text()
    assert text == "\n[llama-corral: the disk refused 14 bytes here]\nback\nagain\n"


def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    with LogFile(tmp_path / "a.log") as log:
        log.close()


@pytest.mark.parametrize("what", ["a link", "a second name", "a pipe"])
def test_a_log_that_is_not_ours_alone_is_refused(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "a.log", tmp_path / "other"
    if what == "a pipe":
        os.mkfifo(path)
    else:
        other.write_text("theirs", "utf-8")
        path.symlink_to(other) if what == "a link" else path.hardlink_to(other)
    with pytest.raises(AccessDenied, match="cannot write the log"):
        LogFile(path)
    assert what == "a pipe" or other.read_text("utf-8") == "theirs"


def test_a_log_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch(mode=0o644)
    LogFile(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_log_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(AccessDenied, match="belongs to another user"):
        LogFile(path)


def test_one_huge_chunk_does_not_exceed_the_limit(tmp_path: Path) -> None:
    with LogFile(tmp_path / "x.log", size_bytes=1000, kept=2) as log:
        log.write(b"x" * 50_000)
        log.write(b"y" * 10)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 3
    assert max(sizes) <= 1000


def test_what_else_writes_to_the_file_follows_it_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with LogFile(path, size_bytes=1000, kept=1, streams=(stream,)) as log:
            os.write(stream, b"z" * 990)
            log.write(b"a" * 20)
            os.write(stream, b"traceback")
        assert path.read_bytes() == b"a" * 20 + b"traceback"
    finally:
        os.close(stream)


@given(st.binary(), st.lists(st.integers(1, 9)))
def test_the_same_lines_come_out_however_the_bytes_come_in(data: bytes, sizes: list[int]) -> None:
    splitter, lines, rest = LineSplitter(), [], data
    for size in sizes:
        lines += splitter.feed(rest[:size])
        rest = rest[size:]
    lines += splitter.feed(rest)
    assert lines == data.split(b"\n")[:-1]


def test_what_a_line_has_beyond_the_limit_is_dropped() -> None:
    splitter = LineSplitter(limit_bytes=4)
    assert splitter.feed(b"ab") == []
    assert splitter.feed(b"cdef") == []
    assert splitter.feed(b"gh\nlong enough\nij") == [b"abcd", b"long"]
    assert splitter.feed(b"\n") == [b"ij"]
