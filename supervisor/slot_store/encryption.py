"""Encrypts slot files, frame by frame, so that none is ever whole in memory.

    u8 x 8: magic   u8 x 32: salt   frames

A frame is 64 KiB of the file, the last one what is left, encrypted by AES-256-GCM and followed by
its tag of 16 bytes. Its nonce is its number in 11 bytes, and a byte that is 1 for the last frame:
so frames that are altered, missing or in another order do not decrypt. The key of a file comes by
HKDF-SHA256 from the salt, the key of the user and the context, which binds the file to its
manifest.

Source: Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance" (STREAM), as in age-encryption.org/v1; RFC 5869.
"""

from __future__ import annotations

import io
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from supervisor.slot_store.key_ring import SlotKey
from supervisor.slot_store.slot_file import InvalidSlotFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC: Final = b"corral\x00\x01"
_SALT_BYTES: Final = 32
_HEAD_BYTES: Final = len(_MAGIC) + _SALT_BYTES
_FRAME_BYTES: Final = 64 * 1024
_TAG_BYTES: Final = 16
_ALTERED: Final = "it was altered, or its manifest was"


def encrypted_bytes(size_bytes: int) -> int:
    """Return the size of an encrypted file."""
    return _HEAD_BYTES + size_bytes + _TAG_BYTES * _frames(size_bytes, _FRAME_BYTES)


def encrypt(source: Path, target: Path, key: SlotKey, context: bytes) -> None:
    """Encrypt a file into a new one of mode 0600, on the disk when this returns.

    Raises:
        OSError: A file cannot be read or written; then there is no target.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    cipher = _cipher(key, salt, context)
    with source.open("rb") as read, _create(target) as write:
        try:
            write.write(_MAGIC + salt)
            count = _frames(os.fstat(read.fileno()).st_size, _FRAME_BYTES)
            for number in range(count):
                frame = read.read(_FRAME_BYTES)
                write.write(cipher.encrypt(_nonce(number, count), frame, None))
            os.fsync(write.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def decrypt(source: Path, target: Path, key: SlotKey, context: bytes) -> None:
    """Decrypt a file into a new one of mode 0600.

    Raises:
        InvalidSlotFile: It is truncated or altered, or of another key or context.
        OSError: A file cannot be read or written. In both cases there is no target.
    """
    with source.open("rb") as read, _create(target) as write:
        try:
            for frame in _decrypted(read, key, context):
                write.write(frame)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def open_decrypted(source: Path, key: SlotKey, context: bytes) -> BinaryIO:
    """Open a file to read it in order; each read verifies what it returns.

    Raises as `decrypt`, also while it is read.
    """
    return io.BufferedReader(_Decrypted(source.open("rb"), key, context))


def seal(text: str, key: SlotKey, context: bytes) -> str:
    """Encrypt a short text; return ASCII."""
    salt = secrets.token_bytes(_SALT_BYTES)
    sealed = _cipher(key, salt, context).encrypt(_nonce(0, 1), text.encode(), None)
    return b64encode(salt + sealed).decode()


def unseal(sealed: str, key: SlotKey, context: bytes) -> str:
    """Return what `seal` was given; raises InvalidSlotFile as `decrypt`."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 (as in _cipher)

    try:
        raw = b64decode(sealed, validate=True)
        cipher = _cipher(key, raw[:_SALT_BYTES], context)
        return cipher.decrypt(_nonce(0, 1), raw[_SALT_BYTES:], None).decode()
    except (InvalidTag, ValueError) as error:
        raise InvalidSlotFile(_ALTERED) from error


class _Decrypted(io.RawIOBase):
    def __init__(self, file: BinaryIO, key: SlotKey, context: bytes) -> None:
        self._file = file
        self._frames = _decrypted(file, key, context)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as it is called
        if not self._left:
            self._left = memoryview(next(self._frames, b""))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _decrypted(file: BinaryIO, key: SlotKey, context: bytes) -> Iterator[bytes]:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 (as in _cipher)

    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
        raise InvalidSlotFile("it does not start like an encrypted file")
    cipher = _cipher(key, head[len(_MAGIC) :], context)
    left_bytes = os.fstat(file.fileno()).st_size - _HEAD_BYTES
    count = _frames(left_bytes, _FRAME_BYTES + _TAG_BYTES)
    for number in range(count):
        frame = file.read(_FRAME_BYTES + _TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(number, count), frame, None)
        except InvalidTag as error:
            raise InvalidSlotFile(_ALTERED) from error


def _cipher(key: SlotKey, salt: bytes, context: bytes) -> AESGCM:
    # Loading it takes 8 MB, so only where files are encrypted.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    info = b"llama-corral slot file\0" + context
    return AESGCM(HKDF(SHA256(), len(key.secret), salt, info).derive(key.secret))


def _frames(size_bytes: int, frame_bytes: int) -> int:
    """Return the number of frames; an empty file has one."""
    return max(1, -(-size_bytes // frame_bytes))


def _nonce(number: int, count: int) -> bytes:
    return number.to_bytes(11, "big") + bytes([number == count - 1])


def _create(target: Path) -> BinaryIO:
    return os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
