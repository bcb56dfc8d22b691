"""The file of API keys: who may read it, and what it may say."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from proxy.auth.secret_file import read_private
from proxy.errors import ConfigError
from proxy.toml_text import parse_toml

# Some thousand keys; more would be looked through for each request.
_FILE_MAX_BYTES: Final = 1024**2
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_SEE: Final = "corral key add NAME writes entries that are right"

_HEAD: Final = """\
# The API keys that llama-corral takes, each by its SHA-256; the keys themselves are not kept.
# corral key add, list and remove read and write this file; other comments are lost with that.
"""

# What changes when a file does: inode, time of its last change in nanoseconds, size in bytes.
FileVersion = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Key:
    """One API key and what it may.

    Attributes:
        name: What it is called in logs and limits.
        digest: SHA-256 of the key, 32 bytes.
        max_in_flight: Requests it may have at once, at least 1, or None: no limit.
        requests_per_minute: Requests it may send, at least 1, or None: no limit.
        models: Ids or aliases of the models it may use, or None: all.
        priority: `batch`: its requests let all others go first, whatever they say. `interactive`:
            they go first unless they say otherwise.
    """

    name: str
    digest: bytes = field(repr=False)
    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    models: frozenset[str] | None = None
    priority: Literal["interactive", "batch"] = "interactive"


class _Entry(BaseModel):
    """`[keys.NAME]`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    key: Annotated[str, Field(pattern=r"^[!-~]{8,512}$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    models: list[Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]] | None = None
    priority: Literal["interactive", "batch"] = "interactive"

    @model_validator(mode="after")
    def _has_one_secret(self) -> _Entry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self

    def named(self, name: str) -> Key:
        digest = (
            bytes.fromhex(self.sha256)
            if self.sha256
            else hashlib.sha256((self.key or "").encode()).digest()
        )
        models = None if self.models is None else frozenset(self.models)
        return Key(
            name, digest, self.max_in_flight, self.requests_per_minute, models, self.priority
        )


def read_keys(path: Path) -> tuple[tuple[Key, ...], FileVersion]:
    """Read a file of keys.

    Returns:
        The keys in the file's order, and the mark of the file as it was read.

    Raises:
        ConfigError: It is not there, others may read it, or something in it is wrong.
    """
    missing = "corral key add NAME makes it; or unset api_keys_file under [proxy]"
    text, found = read_private(path, "the keys file", _FILE_MAX_BYTES, missing=missing, wrong=_SEE)
    return parse_keys(text, path), _mark(found)


def parse_keys(text: bytes, path: Path) -> tuple[Key, ...]:
    """Return the keys that the text of a file says.

    Raises:
        ConfigError: It is no TOML, or an entry is wrong; `path` is named, no key is.
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the keys file {path} is not TOML: {error}", _SEE) from error
    unknown = [name for name in table if name != "keys"]
    entries = table.get("keys", {})
    if unknown or not isinstance(entries, Mapping):
        wrong = unknown[0] if unknown else "keys"
        raise ConfigError(f"{path}: {wrong} is not [keys.NAME]", _SEE)
    keys = tuple(_key(name, entry, path) for name, entry in entries.items())
    _check_distinct(keys, path)
    return keys


def render_keys(keys: Iterable[Key]) -> str:
    """Return the text of a file that says these keys, each by its SHA-256 alone."""
    return "\n".join((_HEAD, *(_render(key) for key in keys)))


def file_version(path: Path) -> FileVersion | None:
    """Return the mark of a file, None where there is none."""
    try:
        return _mark(path.stat())
    except OSError:
        return None


def _render(key: Key) -> str:
    models = sorted(key.models) if key.models is not None else None
    said = {
        "sha256": key.digest.hex(),
        "max_in_flight": key.max_in_flight,
        "requests_per_minute": key.requests_per_minute,
        "models": models,
        "priority": None if key.priority == "interactive" else key.priority,
    }
    # JSON's strings, numbers and lists are TOML's too, as long as no character is beyond U+FFFF.
    lines = [f"{name} = {json.dumps(value)}" for name, value in said.items() if value is not None]
    return "\n".join((f"[keys.{json.dumps(key.name)}]", *lines, ""))


def _mark(found: os.stat_result) -> FileVersion:
    return found.st_ino, found.st_ctime_ns, found.st_size


def _key(name: str, entry: Any, path: Path) -> Key:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: not a name: {name!r}", "use letters, digits and . _ @ + -")
    try:
        return _Entry.model_validate(entry).named(name)
    except ValidationError as error:
        # The values are not repeated: one of them is the key.
        lines = (f"{path}: keys.{name}{_sentence(detail)}" for detail in error.errors())
        raise ConfigError("\n".join(lines), _SEE) from None


def _check_distinct(keys: tuple[Key, ...], path: Path) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise ConfigError(f"{path}: {other} and {key.name} are the same key", _SEE)


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
