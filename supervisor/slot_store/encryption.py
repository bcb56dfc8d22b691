"""How the content of a slot file is stored: encrypted if there is a key, otherwise as it is.

The key file has a key of 64 hexadecimal digits per line, the newest first. The first key encrypts,
all of them decrypt. Empty lines and lines that begin with # are ignored.

Slot files are encrypted in frames, so that none is ever whole in memory:

    u8 x 8: magic   u8 x 32: salt   frames

A frame is 64 KiB of the file, the last one its rest, encrypted by AES-256-GCM and followed by its
tag of 16 bytes. Its nonce is its number in 11 bytes, and a byte that is 1 for the last frame: so
frames that are altered, missing or in another order do not decrypt. The key of a file is derived by
HKDF-SHA256 from the salt, the user's key and the context, which binds the file to its manifest.

Source: Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance" (STREAM), as in age-encryption.org/v1; RFC 5869.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from proxy.auth.keys_file import read_checked
from proxy.errors import ConfigError
from supervisor.engine.client import SlotFileInfo
from supervisor.errors import SettingsInvalid
from supervisor.slot_store import slot_file
from supervisor.slot_store.manifest import SHA256_DIGITS, Manifest
from supervisor.system.files import sha256_of, sync, xxh3_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS_MAX: Final = 16
_KEY_BYTES: Final = 32
_FILE_MAX_BYTES: Final = 16 * 1024
_LINE: Final = re.compile(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")
_WRONG: Final = "a key is a line of 64 hexadecimal digits, as corral slots new-key writes it"
_MISSING: Final = "corral slots new-key makes it; or unset slots_key_file under [supervisor]"


@dataclass(frozen=True, slots=True)
class SlotKey:
    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """The name of the key in manifests, which reveals nothing about it."""
        return hashlib.sha256(b"llama-corral slot key\0" + self.secret).hexdigest()[:16]


# The keys of a file, at least one, by id; the newest first.
KeyRing = Mapping[str, SlotKey]


def read_key_ring(path: Path) -> KeyRing:
    """Read keys. Raises SettingsInvalid: no file, not ours, open to others, or no valid keys."""
    try:
        text, _ = read_checked(
            path, "the slot key file", _FILE_MAX_BYTES, missing=_MISSING, wrong=_WRONG
        )
    except ConfigError as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
    return parse_key_ring(text, path)


def parse_key_ring(text: bytes, path: Path) -> KeyRing:
    """Parse keys; raises SettingsInvalid, whose message contains none of them."""
    keys = []
    for number, line in enumerate(text.decode("ascii", "replace").splitlines(), start=1):
        if not (word := line.strip()) or word.startswith("#"):
            continue
        if not _LINE.fullmatch(word):
            raise SettingsInvalid(f"line {number} of the slot key file {path} is no key", _WRONG)
        keys.append(SlotKey(bytes.fromhex(word)))
    if not 1 <= len(keys) <= KEYS_MAX:
        reason = f"has {len(keys)} keys, not 1 to {KEYS_MAX}"
        raise SettingsInvalid(f"the slot key file {path} {reason}", hint=_WRONG)
    return {key.id: key for key in keys}


def new_key() -> SlotKey:
    return SlotKey(secrets.token_bytes(_KEY_BYTES))


def with_newest(key: SlotKey, text: str) -> str:
    """Return the text of a key file with a new key, which encrypts from now on."""
    return f"{key.secret.hex()}\n{text}"


_MAGIC: Final = b"corral\x00\x01"
_SALT_BYTES: Final = 32
_HEAD_BYTES: Final = len(_MAGIC) + _SALT_BYTES
_FRAME_BYTES: Final = 64 * 1024
_TAG_BYTES: Final = 16
_ALTERED: Final = "it was altered, or its manifest was"


def encrypted_bytes(size_bytes: int) -> int:
    return _HEAD_BYTES + size_bytes + _TAG_BYTES * _frames(size_bytes, _FRAME_BYTES)


def encrypt(source: Path, target: Path, key: SlotKey, context: bytes) -> None:
    """Encrypt a file into a new one of mode 0600, which is on the disk when this returns.

    Raises OSError: a file cannot be read or written; then there is no target.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    cipher = _cipher(key, salt, context)
    with source.open("rb") as read, _create(target) as write:
        write.write(_MAGIC + salt)
        count = _frames(os.fstat(read.fileno()).st_size, _FRAME_BYTES)
        for number in range(count):
            frame = read.read(_FRAME_BYTES)
            write.write(cipher.encrypt(_nonce(number, count), frame, None))
        os.fsync(write.fileno())


def decrypt(source: Path, target: Path, key: SlotKey, context: bytes) -> None:
    """Decrypt a file into a new one of mode 0600; after an error there is none.

    Raises OSError, and InvalidSlotFile: it is truncated or altered, or of another key or context.
    """
    with source.open("rb") as read, _create(target) as write:
        write.writelines(_decrypt_chunks(read, key, context))


def open_decrypted(source: Path, key: SlotKey, context: bytes) -> BinaryIO:
    """Open a file for reading in order; each read verifies its result, and raises as `decrypt`."""
    return io.BufferedReader(_Decrypted(source.open("rb"), key, context))


def seal(text: str, key: SlotKey, context: bytes) -> str:
    """Encrypt a short text; return ASCII."""
    salt = secrets.token_bytes(_SALT_BYTES)
    sealed = _cipher(key, salt, context).encrypt(_nonce(0, 1), text.encode(), None)
    return b64encode(salt + sealed).decode()


def unseal(sealed: str, key: SlotKey, context: bytes) -> str:
    """Reverse `seal`; raises InvalidSlotFile as `decrypt`."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 (as in _cipher)

    try:
        raw = b64decode(sealed, validate=True)
        cipher = _cipher(key, raw[:_SALT_BYTES], context)
        return cipher.decrypt(_nonce(0, 1), raw[_SALT_BYTES:], None).decode()
    except (InvalidTag, ValueError) as error:
        raise slot_file.InvalidSlotFile(_ALTERED) from error


class _Decrypted(io.RawIOBase):
    def __init__(self, file: BinaryIO, key: SlotKey, context: bytes) -> None:
        self._file = file
        self._frames = _decrypt_chunks(file, key, context)
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


def _decrypt_chunks(file: BinaryIO, key: SlotKey, context: bytes) -> Iterator[bytes]:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 (as in _cipher)

    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
        raise slot_file.InvalidSlotFile("it does not start like an encrypted file")
    cipher = _cipher(key, head[len(_MAGIC) :], context)
    left_bytes = os.fstat(file.fileno()).st_size - _HEAD_BYTES
    count = _frames(left_bytes, _FRAME_BYTES + _TAG_BYTES)
    for number in range(count):
        frame = file.read(_FRAME_BYTES + _TAG_BYTES)
        try:
            yield cipher.decrypt(_nonce(number, count), frame, None)
        except InvalidTag as error:
            raise slot_file.InvalidSlotFile(_ALTERED) from error


def _cipher(key: SlotKey, salt: bytes, context: bytes) -> AESGCM:
    # Imported here because it takes 8 MB, which only encryption needs.
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


@contextmanager
def _create(target: Path) -> Iterator[BinaryIO]:
    """Create a file, which an error removes."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        try:
            yield file
        except BaseException:
            target.unlink(missing_ok=True)
            raise


_DRAFT: Final = ".new"
# The spool is in memory, as for encrypted files, or on another disk, or the file system has no hard
# links.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class SlotContent:
    """Moves the content of slot files from the spool and into it; without keys, unencrypted."""

    keys: KeyRing = field(default_factory=dict)

    def is_readable(self, manifest: Manifest) -> bool:
        return not manifest.key_id or manifest.key_id in self.keys

    @staticmethod
    def stored_bytes(manifest: Manifest) -> int:
        size_bytes = manifest.size_bytes
        return encrypted_bytes(size_bytes) if manifest.key_id else size_bytes

    def complete(
        self, unverified: Manifest, spooled: Path, header: slot_file.SlotFileHeader
    ) -> Manifest:
        """Return the complete manifest of a file; an encrypted file needs no hashes."""
        if self.keys:
            return replace(unverified, key_id=next(iter(self.keys)))
        return replace(unverified, checksum=xxh3_of(spooled), tokens_sha256=header.digest)

    def seal(self, manifest: Manifest) -> Manifest:
        """Encrypt the fingerprint, so that the hashes of a known text cannot be found in it."""
        if not manifest.key_id:
            return manifest
        sealed = seal(manifest.fingerprint, self._key(manifest), _seal_context(manifest))
        return replace(manifest, fingerprint=sealed)

    def unseal(self, manifest: Manifest) -> Manifest:
        """Reverse `seal`; without a key for it the fingerprint is empty."""
        if not manifest.key_id:
            return manifest
        try:
            fingerprint = unseal(manifest.fingerprint, self._key(manifest), _seal_context(manifest))
        except slot_file.InvalidSlotFile:
            fingerprint = ""
        return replace(manifest, fingerprint=fingerprint)

    def put(self, spooled: Path, target: Path, manifest: Manifest) -> None:
        """Move a file from spool to disk, encrypted if its manifest has a key. Raises OSError."""
        draft = target.with_suffix(_DRAFT)
        try:
            if manifest.key_id:
                encrypt(spooled, draft, self._key(manifest), _context(manifest))
            else:
                _move(spooled, draft)
                sync(draft)
            draft.replace(target)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def take(self, path: Path, link: Path, manifest: Manifest) -> None:
        """Put a file into the spool, and verify it there, which reads the disk once.

        After an error, `link` may be left. Raises SlotKeyMissing, InvalidSlotFile if it differs
        from its manifest, and OSError, also if the spool is full (ENOSPC).
        """
        if manifest.key_id:
            slot_file.check_size(path, encrypted_bytes(manifest.size_bytes))
            _check_room(link.parent, manifest.size_bytes)
            decrypt(path, link, self._key(manifest), _context(manifest))
            return
        slot_file.check_size(path, manifest.size_bytes)
        try:
            os.link(path, link)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            _check_room(link.parent, manifest.size_bytes)
            shutil.copyfile(path, link)
            link.chmod(0o600)
        header = self.header(link, manifest)
        is_older = len(manifest.checksum) == SHA256_DIGITS
        checksum = (sha256_of if is_older else xxh3_of)(link)
        if (header.digest, checksum) != (manifest.tokens_sha256, manifest.checksum):
            raise slot_file.InvalidSlotFile("its content was altered")

    def header(self, path: Path, manifest: Manifest) -> slot_file.SlotFileHeader:
        """Read the header of a file; raises as `take`."""
        expected = SlotFileInfo(manifest.tokens, manifest.size_bytes)
        if not manifest.key_id:
            return slot_file.read_checked(path, expected)
        slot_file.check_size(path, encrypted_bytes(manifest.size_bytes))
        with open_decrypted(path, self._key(manifest), _context(manifest)) as file:
            return slot_file.check_header(file, expected)

    def _key(self, manifest: Manifest) -> SlotKey:
        found = self.keys.get(manifest.key_id)
        if found is None:
            raise slot_file.SlotKeyMissing(f"its key {manifest.key_id} is not at hand")
        return found


PLAIN: Final = SlotContent()


def _context(manifest: Manifest) -> bytes:
    """Return the members of a manifest that never change."""
    members = ("name", "model", "size_bytes", "tokens", "key_id")
    fixed = {name: getattr(manifest, name) for name in members}
    fixed["identity"] = manifest.identity.members
    return json.dumps(fixed, sort_keys=True).encode()


def _seal_context(manifest: Manifest) -> bytes:
    return b"fingerprint of " + _context(manifest)


def _move(source: Path, target: Path) -> None:
    """Move a file, also to another file system; its mode is then 0600. Raises OSError."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)
    target.chmod(0o600)


def _check_room(directory: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < size_bytes:
        reason = f"{directory} has {free_bytes:,} bytes left, and it needs {size_bytes:,}"
        raise OSError(errno.ENOSPC, reason)
