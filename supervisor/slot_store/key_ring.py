"""The keys that encrypt slot files: 64 hexadecimal digits a line, the newest key first.

The first key encrypts, all of them decrypt. Empty lines and those that begin with # are ignored.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from proxy.auth.secret_file import read_private
from proxy.errors import ConfigError
from supervisor.errors import SettingsInvalid

KEYS_MAX: Final = 16
_KEY_BYTES: Final = 32
_FILE_MAX_BYTES: Final = 16 * 1024
_LINE: Final = re.compile(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")
_WRONG: Final = "a key is a line of 64 hexadecimal digits, as corral slots new-key writes it"
_MISSING: Final = "corral slots new-key makes it; or unset slots_key_file under [supervisor]"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """A key of 256 bits."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Names the key in manifests, and reveals nothing of it."""
        return hashlib.sha256(b"llama-corral slot key\0" + self.secret).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of a file, at least one."""

    newest: SlotKey
    by_id: Mapping[str, SlotKey]


def read_key_ring(path: Path) -> KeyRing:
    """Read a file of keys.

    Raises:
        SettingsInvalid: It is missing, another user's, open to others, or has no valid keys.
    """
    try:
        text, _ = read_private(
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
    return KeyRing(keys[0], {key.id: key for key in keys})


def new_key() -> SlotKey:
    return SlotKey(secrets.token_bytes(_KEY_BYTES))


def with_newest(key: SlotKey, text: str) -> str:
    """Return the text of a file of keys with one more, which encrypts from now on."""
    return f"{key.secret.hex()}\n{text}"
