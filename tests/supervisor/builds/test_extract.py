from __future__ import annotations

import gzip
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.release_server import engine_archive, member, tar_of, zip_of

from supervisor.builds.install import ArchiveRefused, expanded_max_bytes, extract

MIB = 1024**2


def extracted(root: Path, content: bytes, suffix: str = "tar.gz") -> Path:
    """Extract an archive; the directory above must then have nothing but the two."""
    archive, target = root / f"a.{suffix}", root / "out"
    archive.write_bytes(content)
    try:
        extract(archive, target, MIB, max_entries=20)
    finally:
        assert {path.name for path in root.iterdir()} == {archive.name, "out"}
    return target


def test_a_release_is_extracted(tmp_path: Path) -> None:
    found = extracted(tmp_path, engine_archive("b1", b"#!/bin/sh\n")) / "llama-b1"
    assert stat.S_IMODE((found / "llama-server").stat().st_mode) == 0o755
    assert stat.S_IMODE((found / "LICENSE").stat().st_mode) == 0o644
    assert (found / "libllama.so").read_bytes() == b"library"
    assert (found / "libllama.so").readlink() == Path("libllama.so.0")


def test_an_old_release_is_extracted(tmp_path: Path) -> None:
    content = zip_of(
        ("build/bin/", 0o40755, b""),
        ("build/bin/llama-server", 0o100755, b"#!/bin/sh\n"),
        ("build/bin/libllama.so", 0o120777, b"libllama.so.1"),
        ("build/bin/libllama.so.1", 0o100644, b"library"),
    )
    found = extracted(tmp_path, content, "zip") / "build" / "bin"
    assert stat.S_IMODE((found / "llama-server").stat().st_mode) == 0o755
    assert (found / "libllama.so").read_bytes() == b"library"


def entry(*args: Any, **kwargs: Any) -> bytes:
    return tar_of((member(*args, **kwargs), b"x"))


LINK, HARD, FIFO = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(entry("../evil"), id="above"),
        pytest.param(entry("a/../../evil"), id="above, further in"),
        pytest.param(entry("/srv/evil"), id="absolute"),
        pytest.param(entry("a\\..\\evil"), id="backslashes"),
        pytest.param(entry("a\nb"), id="a newline"),
        pytest.param(entry("a/" * 20 + "b"), id="deep"),
        pytest.param(entry("n" * 300), id="long"),
        pytest.param(entry("a", kind=LINK, to="/etc/passwd"), id="absolute link"),
        pytest.param(entry("a", kind=LINK, to="../.."), id="link above"),
        pytest.param(entry("a", kind=LINK, to=".."), id="link to the parent"),
        pytest.param(entry("a", kind=LINK, to=""), id="link to nothing"),
        pytest.param(entry("a", kind=HARD, to="/etc/passwd"), id="hard link"),
        pytest.param(entry("a", kind=FIFO), id="pipe"),
        pytest.param(entry("a", kind=tarfile.CHRTYPE), id="device"),
        pytest.param(tar_of((member("a"), b"x"), (member("a"), b"y")), id="twice"),
        pytest.param(tar_of((member("a"), b"x"), (member("a/b"), b"y")), id="below a file"),
        pytest.param(
            tar_of((member("a", kind=LINK, to="b"), b""), (member("a/c"), b"y")),
            id="below a link",
        ),
        pytest.param(
            tar_of((member("a", kind=LINK, to="b"), b""), (member("a"), b"y")), id="through a link"
        ),
        pytest.param(
            tar_of(*((member(f"f{number}"), b"") for number in range(21))), id="many entries"
        ),
        pytest.param(tar_of((member("a"), bytes(2 * MIB))), id="a bomb"),
        pytest.param(
            tar_of(*((member(f"f{number}"), bytes(MIB // 8)) for number in range(10))),
            id="a bomb of many",
        ),
        pytest.param(b"no archive", id="no archive"),
        pytest.param(gzip.compress(b"no tar" * 200), id="no tar"),
        pytest.param(tar_of((member("a"), os.urandom(5000)))[:-3000], id="truncated"),
    ],
)
def test_what_is_not_safe_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ArchiveRefused):
        extracted(tmp_path, content)


def test_a_header_that_expands_is_refused(tmp_path: Path) -> None:
    """The names of a file that is described by a header of 30 MB of zeros."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 30 * MIB
    content = gzip.compress(header.tobuf() + bytes(30 * MIB))
    with pytest.raises(ArchiveRefused):
        extracted(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        zip_of(("../evil", 0o100644, b"x")),
        zip_of(("/evil", 0o100644, b"x")),
        zip_of(("a", 0o120777, b"../../etc")),
        zip_of(("a", 0o010644, b"")),
        zip_of(("a", 0o100644, bytes(2 * MIB))),
        b"PK no zip",
    ],
)
def test_a_zip_that_is_not_safe_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ArchiveRefused):
        extracted(tmp_path, content, "zip")


def test_an_archive_may_expand_as_much_as_releases_do() -> None:
    assert expanded_max_bytes(17 * MIB) > 4 * 17 * MIB
