"""The manifest of a slot file, as JSON beside it; which files belong to one conversation.

A manifest holds a hash of itself, so that a change is detected. Pure, except `cache_key`.

A file has the hashes of the last turns before it was saved. The files of a conversation that was
saved several times, or continued in two ways, each share some turns with the next, but not all with
each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from proxy.cache.fingerprint import decode_fingerprint
from proxy.common.toml_text import table_beside
from supervisor.errors import NoSuchConversation
from supervisor.plan.kv_cache import state_bytes
from supervisor.plan.loras import SCALED, files_of
from supervisor.plan.plan import Plan, PlanLine
from supervisor.system.files import is_regular

FORMAT: Final = 3
SHA256_DIGITS: Final = 64

_WITHOUT_EFFECT: Final = frozenset[str](table_beside(__file__)["without_effect"])
_SLOTS: Final = "--parallel"
_OWN_CACHES: Final = "--no-kv-unified"
_FULL_WINDOW: Final = "--swa-full"


OTHER_FORMAT: Final = "its manifest has another format"


class ManifestInvalid(ValueError): ...


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The properties of the engine that made a cache; another engine must have them to use it."""

    model: str  # the fingerprint of the GGUF
    engine: str  # version and size in bytes
    # The options that change the contents of a cache; with size and date if they name a file.
    options: tuple[str, ...]
    # The recurrent state of one sequence; 0 without recurrent layers, None if unknown.
    state_bytes: int | None = 0
    window: int = 0  # tokens of the sliding window that the cache of some layers keeps, or 0

    @property
    def slots(self) -> int | None:
        """The number of slots if each has a separate cache and files can be rewritten, or None.

        Files cannot be rewritten with a recurrent state of unknown size, or beside a window.
        """
        is_opaque = self.state_bytes is None or (self.state_bytes and self.has_window)
        if _OWN_CACHES not in self.options or is_opaque:
            return None
        words = (option.split() for option in self.options)
        return next((int(word[1]) for word in words if word[0] == _SLOTS), None)

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether a file helps only prompts that continue all of it.

        A recurrent state cannot be cut back. With a sliding window the file has only the latest
        tokens, also with `swa-full`: of 412 tokens and a window of 64, build 10434 found nothing
        for a prompt that differed before the last 63 tokens (a live slot: all up to there).
        """
        return self.state_bytes != 0 or self.has_window

    @property
    def has_window(self) -> bool:
        """Whether a file may have two caches, of layers without and with a sliding window."""
        return bool(self.window) or _FULL_WINDOW in self.options

    @property
    def members(self) -> dict[str, Any]:
        """Its members for digests; keys of models without a window have none for it."""
        members = asdict(self)
        if not self.window:
            del members["window"]
        return members

    def fits(self, other: CacheKey) -> bool:
        """Whether an engine of this key can use a cache of the other, rewritten if need be."""
        return self == other or (
            None not in {self.slots, other.slots} and self.without_slots == other.without_slots
        )

    @property
    def without_slots(self) -> CacheKey:
        options = tuple(option for option in self.options if option.split()[0] != _SLOTS)
        return replace(self, options=options)


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str  # of the file, without suffix; random
    model: str  # its name in the settings
    replica: int  # the replica that saved it, from 0
    identity: CacheKey
    size_bytes: int
    # XXH3 of the file, a SHA-256 if an earlier version wrote it; empty if it is encrypted, which
    # verifies it.
    checksum: str
    tokens: int
    tokens_sha256: str  # empty if it is encrypted
    ctx_slot: int  # the context size of a slot when it was saved
    fingerprint: str  # the proxy's, of the conversation; empty if unknown; encrypted with the file
    saved_at: datetime
    used_at: datetime  # for files saved together, only the order matters
    key_id: str = ""  # the SlotKey.id of the key that encrypts the file; empty if none does
    daemon: str = ""  # the daemon that saved it into a shared directory

    @property
    def adapters(self) -> list[str]:
        """The files of the adapters that computed it, each with its scale unless that is 1."""
        scales = decode_fingerprint(self.fingerprint).scales
        words = (option.split(" ", 1) for option in self.identity.options)
        value = next((word[1] for word in words if word[0] == f"--{SCALED}"), "")
        files = files_of(SCALED, value.partition(" (")[0])  # before the files' stamps
        pairs = zip(files, scales, strict=False)
        return [
            file.stem if scale == 1 else f"{file.stem} {scale:g}" for file, scale in pairs if scale
        ]


def cache_key(plan: Plan) -> CacheKey:
    """Return the cache key of a plan; reads the metadata of the files in its options."""
    words = (" ".join(filter(None, (line.flag, _with_file_stamps(line)))) for line in plan.lines)
    engine_bytes = plan.engine.path.stat().st_size if plan.engine.path.is_file() else 0
    # A recurrent state does not depend on the number of slots.
    without = _WITHOUT_EFFECT if any(plan.gguf.kv_heads) else _WITHOUT_EFFECT | {_SLOTS}
    return CacheKey(
        model=plan.gguf.fingerprint,
        engine=f"{plan.engine.version}, {engine_bytes} bytes",
        options=tuple(word for word in words if word.split()[0] not in without),
        state_bytes=state_bytes(plan.gguf) or (None if plan.gguf.recurrent else 0),
        window=plan.window_tokens,
    )


def dump(manifest: Manifest) -> str:
    content = asdict(manifest) | {"format": FORMAT}
    for when in ("saved_at", "used_at"):
        content[when] = content[when].isoformat()
    if not manifest.daemon:  # earlier versions refuse members that they do not know
        del content["daemon"]
    return json.dumps({**content, "check": _check(content)}, indent=1)


def load(text: str) -> Manifest:
    """Parse a manifest. Raises ManifestInvalid: it is unreadable, altered, or of another format."""
    try:
        content = json.loads(text)
        if content.pop("check") != _check(content):
            raise ManifestInvalid("its manifest was altered")
        if content.pop("format") != FORMAT:
            raise ManifestInvalid(OTHER_FORMAT)
        return _manifest(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestInvalid(f"its manifest cannot be read: {error}") from error


def _manifest(content: dict[str, Any]) -> Manifest:
    identity = content["identity"]
    if "sha256" in content:  # of an earlier version
        content["checksum"] = content.pop("sha256")
    return Manifest(
        **{
            **content,
            "identity": CacheKey(**{**identity, "options": tuple(identity["options"])}),
            "saved_at": datetime.fromisoformat(content["saved_at"]),
            "used_at": datetime.fromisoformat(content["used_at"]),
        }
    )


def _check(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _with_file_stamps(line: PlanLine) -> str | None:
    """Return an option's value, with size and date of each file that it names."""
    value = line.value
    if value is None or "/" not in value:
        return value
    paths = files_of(line.flag.lstrip("-"), value) or [Path(value)]
    found = [path.stat() for path in paths if is_regular(path)]
    stamps = "; ".join(f"{file.st_size} bytes, {file.st_mtime_ns}" for file in found)
    return f"{value} ({stamps})" if found else value


# The turns of each file, by its name.
Turns = Mapping[str, Collection[int]]


def turns_of(saved: Iterable[Manifest]) -> Turns:
    return {
        manifest.name: decode_fingerprint(manifest.fingerprint).turn_hashes for manifest in saved
    }


def find_file(files: Turns, name: str) -> str:
    """Return the one file whose name begins so. Raises NoSuchConversation: none, or several."""
    found = [file for file in files if name and file.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} saved conversations begin" if found else "no saved conversation begins"
    raise NoSuchConversation(f"{what} with {name!r}", hint="corral slots list has their names")


def find_conversation(files: Turns, turns: Collection[int]) -> tuple[list[str], frozenset[int]]:
    """Return the files that share a turn with these, directly or through others; and all turns."""
    found, known, left = list[str](), {*turns}, dict(files)
    while more := [name for name, its in left.items() if known.intersection(its)]:
        for name in more:
            known.update(left.pop(name))
        found += more
    return found, frozenset(known)
