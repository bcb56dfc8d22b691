"""Encrypted slot files: they decrypt to the same bytes, and changed files are refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.slot_store.encryption import (
    SlotKey,
    decrypt,
    encrypt,
    encrypted_bytes,
    new_key,
    open_decrypted,
    seal,
    unseal,
)
from supervisor.slot_store.slot_file import InvalidSlotFile

KEY = new_key()
FRAME, TAG, HEAD = 64 * 1024, 16, 40
SIZES = (0, 1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME, 3 * FRAME + 5)


def telling(size: int) -> list[int]:
    """Return offsets in an encrypted file: the head, and around the begin of each frame and tag."""
    edges = [at for begin in range(HEAD, size, FRAME + TAG) for at in (begin, begin + FRAME)]
    around = {at + by for at in (*edges, size) for by in range(-TAG - 1, TAG + 1)}
    return sorted(at for at in {*range(HEAD), *around} if 0 <= at < size)


def encrypted(directory: Path, plain: bytes) -> Path:
    source, target = directory / "plain", directory / "encrypted"
    source.write_bytes(plain)
    target.unlink(missing_ok=True)
    encrypt(source, target, KEY, b"context")
    return target


def refused(path: Path, key: SlotKey = KEY, context: bytes = b"context") -> bool:
    target = path.with_name("refused")
    with pytest.raises(InvalidSlotFile):
        decrypt(path, target, key, context)
    return not target.exists()


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_in_comes_out(tmp_path: Path, size: int) -> None:
    plain = os.urandom(size)
    path, again = encrypted(tmp_path, plain), tmp_path / "again"
    decrypt(path, again, KEY, b"context")
    assert again.read_bytes() == plain
    assert path.stat().st_size == encrypted_bytes(size)
    assert [path.stat().st_mode & 0o777, again.stat().st_mode & 0o777] == [0o600, 0o600]
    with open_decrypted(path, KEY, b"context") as file:
        assert file.read(10) + file.read() == plain


def test_nothing_of_the_content_shows_and_no_two_are_equal(tmp_path: Path) -> None:
    plain = b"the same words " * 20
    found = [encrypted(tmp_path, plain).read_bytes() for _ in range(2)]
    assert found[0][HEAD:] != found[1][HEAD:]
    assert not any(b"words" in entry for entry in found)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_ends_anywhere_else_is_refused(tmp_path: Path, size: int) -> None:
    path = encrypted(tmp_path, os.urandom(size))
    whole = path.read_bytes()
    for end in telling(len(whole)):
        path.write_bytes(whole[:end])
        assert refused(path)
    for more in (b"!", bytes(TAG), bytes(FRAME + TAG)):
        path.write_bytes(whole + more)
        assert refused(path)


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    path = encrypted(tmp_path, os.urandom(2 * FRAME))
    whole = path.read_bytes()
    for at in telling(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert refused(path)


SWAPPED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "reordered": lambda frames: [frames[1], frames[0], *frames[2:]],
    "without the first": lambda frames: frames[1:],
    "without the last": lambda frames: frames[:-1],
    "one of them twice": lambda frames: [frames[0], *frames],
}


@pytest.mark.parametrize("change", SWAPPED)
def test_frames_have_one_order(tmp_path: Path, change: str) -> None:
    path = encrypted(tmp_path, os.urandom(4 * FRAME))
    whole, step = path.read_bytes(), FRAME + TAG
    frames = [whole[at : at + step] for at in range(HEAD, len(whole), step)]
    path.write_bytes(whole[:HEAD] + b"".join(SWAPPED[change](frames)))
    assert refused(path)


def test_a_frame_of_another_file_is_refused(tmp_path: Path) -> None:
    first = encrypted(tmp_path, bytes(3 * FRAME)).read_bytes()
    path = encrypted(tmp_path, bytes(3 * FRAME))
    second = path.read_bytes()
    path.write_bytes(first[: HEAD + FRAME + TAG] + second[HEAD + FRAME + TAG :])
    assert refused(path)


def test_another_key_or_context_is_refused(tmp_path: Path) -> None:
    path = encrypted(tmp_path, b"text")
    assert refused(path, key=new_key())
    assert refused(path, context=b"of another manifest")


def test_a_text_is_sealed() -> None:
    sealed = seal("2 1 abc", KEY, b"context")
    assert sealed.isascii()
    assert "abc" not in sealed
    assert unseal(sealed, KEY, b"context") == "2 1 abc"
    for wrong in ("", "abc", sealed[:-8], f"{sealed}ü", sealed.swapcase()):
        with pytest.raises(InvalidSlotFile):
            unseal(wrong, KEY, b"context")
    with pytest.raises(InvalidSlotFile):
        unseal(sealed, KEY, b"of another manifest")


def test_a_plain_file_is_no_encrypted_one(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(bytes(1000))
    assert refused(path)
