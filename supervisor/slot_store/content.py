"""How the content of a slot file is kept: encrypted where there is a key, else as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from supervisor.engine_client.slots import SlotFileInfo
from supervisor.engines.pins import sha256_of
from supervisor.host.files import sync
from supervisor.slot_store.encryption import (
    decrypt,
    encrypt,
    encrypted_bytes,
    open_decrypted,
    seal,
    unseal,
)
from supervisor.slot_store.key_ring import KeyRing, SlotKey
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.slot_file import (
    InvalidSlotFile,
    SlotFileHeader,
    SlotKeyMissing,
    check_header,
    read_checked,
)

_DRAFT: Final = ".new"


@dataclass(frozen=True, slots=True)
class SlotContent:
    """Moves the content of slot files out of the spool and into it."""

    keys: KeyRing | None = None

    def is_readable(self, manifest: Manifest) -> bool:
        return not manifest.key_id or bool(self.keys and manifest.key_id in self.keys.by_id)

    def completed(self, unverified: Manifest, spooled: Path, header: SlotFileHeader) -> Manifest:
        """Return the manifest of a file that is to be kept; encryption needs no hashes."""
        if self.keys:
            return replace(unverified, key_id=self.keys.newest.id)
        return replace(unverified, sha256=sha256_of(spooled), tokens_sha256=header.digest)

    def sealed(self, manifest: Manifest) -> Manifest:
        """Return a manifest as it is kept: who knows a text cannot find its hashes in it."""
        if not manifest.key_id:
            return manifest
        sealed = seal(manifest.fingerprint, self._key(manifest), _sealing(manifest))
        return replace(manifest, fingerprint=sealed)

    def opened(self, manifest: Manifest) -> Manifest:
        """Return what was sealed; without its fingerprint if no key at hand opens it."""
        if not manifest.key_id:
            return manifest
        try:
            fingerprint = unseal(manifest.fingerprint, self._key(manifest), _sealing(manifest))
        except InvalidSlotFile:
            fingerprint = ""
        return replace(manifest, fingerprint=fingerprint)

    def put(self, spooled: Path, target: Path, manifest: Manifest) -> None:
        """Move a file from the spool, whole and on the disk; encrypted if its manifest has a key.

        Raises:
            OSError: The disk refused.
        """
        if not manifest.key_id:
            spooled.chmod(0o600)
            sync(spooled)
            spooled.replace(target)
            return
        draft = target.with_suffix(_DRAFT)
        encrypt(spooled, draft, self._key(manifest), _context(manifest))
        draft.replace(target)

    def take(self, path: Path, link: Path, manifest: Manifest) -> None:
        """Put a file, verified, into the spool.

        Raises:
            SlotKeyMissing: No key at hand decrypts it.
            InvalidSlotFile: It differs from its manifest.
            OSError: It cannot be read, or the spool is full (ENOSPC).
        """
        if manifest.key_id:
            _check_size(path, manifest)
            _check_room(link.parent, manifest.size_bytes)
            decrypt(path, link, self._key(manifest), _context(manifest))
            return
        header = self.header(path, manifest)
        if (header.digest, sha256_of(path)) != (manifest.tokens_sha256, manifest.sha256):
            raise InvalidSlotFile("its content was altered")
        _link(path, link, manifest.size_bytes)

    def header(self, path: Path, manifest: Manifest) -> SlotFileHeader:
        """Read what a file holds, without its content; raises as `take`."""
        expected = SlotFileInfo(manifest.tokens, manifest.size_bytes)
        if not manifest.key_id:
            return read_checked(path, expected)
        _check_size(path, manifest)
        with open_decrypted(path, self._key(manifest), _context(manifest)) as file:
            return check_header(file, expected)

    def _key(self, manifest: Manifest) -> SlotKey:
        found = self.keys.by_id.get(manifest.key_id) if self.keys else None
        if found is None:
            raise SlotKeyMissing(f"its key {manifest.key_id} is not at hand")
        return found


PLAIN: Final = SlotContent()


def _context(manifest: Manifest) -> bytes:
    """Return what of a manifest belongs to its file and never changes."""
    members = ("name", "model", "size_bytes", "tokens", "key_id")
    fixed = {name: getattr(manifest, name) for name in members}
    fixed["identity"] = asdict(manifest.identity)
    return json.dumps(fixed, sort_keys=True).encode()


def _sealing(manifest: Manifest) -> bytes:
    return b"fingerprint of " + _context(manifest)


def _check_size(path: Path, manifest: Manifest) -> None:
    expected_bytes = encrypted_bytes(manifest.size_bytes)
    if (size_bytes := path.stat().st_size) != expected_bytes:
        raise InvalidSlotFile(f"it has {size_bytes:,} bytes, not {expected_bytes:,}")


def _check_room(directory: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < size_bytes:
        reason = f"{directory} has {free_bytes:,} bytes left, and it needs {size_bytes:,}"
        raise OSError(errno.ENOSPC, reason)


def _link(path: Path, link: Path, size_bytes: int) -> None:
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno != errno.EXDEV:  # the spool is in memory, as for encrypted files
            raise
        _check_room(link.parent, size_bytes)
        shutil.copyfile(path, link)
        link.chmod(0o600)
