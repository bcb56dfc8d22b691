"""Reads and writes the TOML file of API keys, and reads other files with secrets.

    [keys.NAME]
    sha256 = "64 hexadecimal digits"     or  key = "the key itself"
    max_in_flight = 4                    concurrent requests
    requests_per_minute = 60
    tokens_per_minute = 20000            prompts and answers together
    tokens_per_day = 1000000
    max_context = 8192                   of a prompt and its requested answer
    models = ["qwen3"]                   ids or aliases; unset: all
    priority = "batch"                   its requests queue behind all others
    admin = true                         it sees and controls the requests of all clients
    tools = true                         it uses the tools of engines, if a model has engine_tools

A file with a secret must belong to us or root and be closed to others, as ssh requires. A systemd
credential has an access list for its user, which looks like access for a group; its directory is
visible only to the service. Source: systemd.exec(5), `LoadCredential=`; acl(5), "Correspondence
between ACL entries and file permission bits".
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from proxy.common.toml_text import parse_toml
from proxy.errors import ConfigError


def read_checked(
    path: Path, what: str, max_bytes: int, *, missing: str, wrong: str, is_private: bool = True
) -> tuple[bytes, os.stat_result]:
    """Return the content and the stat of a file of keys or certificates.

    Args:
        what: The file's name in messages, for example `the keys file`.
        missing: Hint if the file cannot be read.
        wrong: Hint if its content or type is wrong.
        is_private: Whether it has a secret: no other user may own or read it.

    Raises ConfigError: it is missing or too large, or another user may read the secret in it.
    """
    try:
        # O_NONBLOCK: a pipe in its place must not block us.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{what} {path} is not a regular file", wrong)
            if is_private:
                _check_access(path, what, found)
            text = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be read: {reason}", missing) from error
    if len(text) > max_bytes:
        size = f"{max_bytes // 1024**2} MiB" if max_bytes >= 1024**2 else f"{max_bytes} bytes"
        raise ConfigError(f"{what} {path} is larger than {size}", wrong)
    return text, found


def _check_access(path: Path, what: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    is_credential = bool(credentials) and path.parent == Path(credentials or "")
    if mode & (0o037 if is_credential else 0o077):
        reason = f"is open to others (mode {mode:o})"
        raise ConfigError(f"{what} {path} {reason}", f"chmod 600 {path}")
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{what} {path} belongs to another user", f"chown it: {path}")


FILE_NAME: Final = "keys.toml"  # beside the settings, unless api_keys_file names another
# A few thousand keys; each request is compared with all of them.
_FILE_MAX_BYTES: Final = 1024**2
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_HINT: Final = "corral key add NAME writes valid entries"

_HEADER: Final = """\
# API keys of llama-corral, each by its SHA-256; the keys themselves are not stored.
# corral key add, list and remove read and write this file; they drop other comments.
"""

# Inode, ctime in nanoseconds, size in bytes; changes whenever the file does.
FileVersion = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Key:
    """One API key and its limits."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key, 32 bytes.
    max_in_flight: int | None = None  # At least 1; None: no limit.
    requests_per_minute: int | None = None  # At least 1; None: no limit.
    models: frozenset[str] | None = None  # Ids or aliases of the models that it may use; None: all.
    # If `batch`, a request cannot raise its own priority.
    priority: Literal["interactive", "batch"] = "interactive"
    admin: bool = False  # It sees the requests of all keys, and may use the dashboard.
    # It may use the tools that engines run, and so commands of the daemon's user. `admin` does not
    # imply it.
    tools: bool = False
    # Tokens of prompts and answers, at least 1; None: no limit.
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None  # As `tokens_per_minute`.
    # Tokens of a prompt and its requested answer, at least 1; None: no limit.
    max_context: int | None = None

    @property
    def limits_tokens(self) -> bool:
        limits = (self.tokens_per_minute, self.tokens_per_day, self.max_context)
        return any(limit is not None for limit in limits)


_ModelName = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
_TokenLimit = Annotated[int, Field(ge=1, le=10**12)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    key: Annotated[str, Field(pattern=r"^[!-~]{8,512}$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    models: Annotated[frozenset[_ModelName], Field(strict=False)] | None = None
    priority: Literal["interactive", "batch"] = "interactive"
    admin: bool = False
    tools: bool = False
    tokens_per_minute: _TokenLimit | None = None
    tokens_per_day: _TokenLimit | None = None
    max_context: _TokenLimit | None = None

    @model_validator(mode="after")
    def _has_one_secret(self) -> _Entry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self

    def to_key(self, name: str) -> Key:
        digest = self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()
        fields = self.model_dump(exclude={"key", "sha256"})
        return Key(name, bytes.fromhex(digest), **fields)


def read_keys(path: Path) -> tuple[tuple[Key, ...], FileVersion]:
    """Return the keys in the file's order, and the version of the file that was read.

    Raises ConfigError if it is missing, open to others, or invalid.
    """
    missing = "corral key add NAME creates it; or unset api_keys_file under [proxy]"
    text, found = read_checked(path, "the keys file", _FILE_MAX_BYTES, missing=missing, wrong=_HINT)
    return parse_keys(text, path), _version(found)


def parse_keys(text: bytes, path: Path) -> tuple[Key, ...]:
    """Parse the file's text. Raises ConfigError if it is invalid; the message contains no key."""
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the keys file {path} is not TOML: {error}", _HINT) from error
    unknown = [name for name in table if name != "keys"]
    if unknown:
        reason = f"unexpected key {unknown[0]!r}; expected tables named [keys.NAME]"
        raise ConfigError(f"{path}: {reason}", _HINT)
    entries = table.get("keys", {})
    if not isinstance(entries, Mapping):
        raise ConfigError(f"{path}: 'keys' must be tables named [keys.NAME]", _HINT)
    keys = tuple(_key(name, entry, path) for name, entry in entries.items())
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise ConfigError(f"{path}: {other} and {key.name} are the same key", _HINT)
    return keys


def render_keys(keys: Iterable[Key]) -> str:
    return "\n".join((_HEADER, *(_render(key) for key in keys)))


def file_version(path: Path) -> FileVersion | None:
    try:
        return _version(path.stat())
    except OSError:
        return None


def _render(key: Key) -> str:
    members = {"sha256": key.digest.hex()}
    members |= {name: getattr(key, name) for name in _Entry.model_fields if hasattr(key, name)}
    # These JSON values are valid TOML too, as no character is above U+FFFF.
    lines = [
        f"{name} = {json.dumps(value, default=sorted)}"
        for name, value in members.items()
        if name == "sha256" or value != _Entry.model_fields[name].default
    ]
    return "\n".join((f"[keys.{json.dumps(key.name)}]", *lines, ""))


def _version(found: os.stat_result) -> FileVersion:
    return found.st_ino, found.st_ctime_ns, found.st_size


def _key(name: str, entry: Any, path: Path) -> Key:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: invalid name {name!r}", "use letters, digits and . _ @ + -")
    try:
        return _Entry.model_validate(entry).to_key(name)
    except ValidationError as error:
        # The message leaves out the values, because one of them is the key.
        lines = (f"{path}: keys.{name}{_sentence(detail)}" for detail in error.errors())
        raise ConfigError("\n".join(lines), _HINT) from None


def _sentence(detail: ErrorDetails) -> str:
    where = "".join(f".{part}" for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][-1]), _Entry.model_fields, n=1)
        return f"{where} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    if detail["loc"] == ("key",):
        return f"{where} must be 8 to 512 printable characters without a space"
    if detail["loc"] == ("sha256",):
        return f"{where} must be 64 hexadecimal digits"
    return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
