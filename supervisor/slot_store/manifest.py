"""What is known of a slot file, and what it must match to be put back. Pure but for `cache_key`.

A manifest stands beside its file as JSON. It carries a hash of itself, so that one that was altered
is told from one that was written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from supervisor.engine_client.slots import SlotFileInfo
from supervisor.flags.plan import Plan
from supervisor.host.files import is_regular
from supervisor.slot_store.slot_file import SlotFileHeader

FORMAT: Final = 3
# The proxy's word for a prompt of half a million bytes has some 90,000 characters.
_CHAIN_MAX_CHARACTERS: Final = 128 * 1024

# Options that change nothing of what a cache holds. All others must be the same, those that a later
# build brings included: a cache thrown away costs seconds, a wrong one makes wrong text.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "--model", "--alias", "--ctx-size", "--metrics", "--slots", "--no-ui", "--no-webui",
        "--cors-origins", "--offline", "--jinja", "--log-colors", "--sse-ping-interval",
        "--threads", "--threads-batch", "--prio", "--prio-batch", "--poll", "--poll-batch",
        "--cpu-mask", "--cpu-range", "--cpu-strict", "--batch-size", "--ubatch-size",
        "--cache-ram", "--cont-batching", "--slot-prompt-similarity", "--load-mode", "--mlock",
        "--no-mmap", "--mmap", "--timeout", "--threads-http", "--warmup", "--no-warmup", "--fit",
        "--gpu-layers", "--n-gpu-layers", "--device", "--main-gpu", "--tensor-split",
        "--verbosity", "--log-verbosity", "--log-timestamps",
    }
)  # fmt: skip


class ManifestInvalid(ValueError):
    """What is there is no manifest of ours, or was altered."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a cache belongs to: it is of use to an engine of the same identity alone.

    Attributes:
        model: The fingerprint of the GGUF.
        engine: Its version and size in bytes.
        options: Of the command line, those that change what a cache holds, in order: types of keys
            and values, flash attention, sliding window, LoRA with its file's size and date, number
            of slots and the like.
    """

    model: str
    engine: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One saved slot.

    Attributes:
        name: Of its file, without an ending; random.
        model: The model, by the name in the settings.
        replica: Which replica saved it, from 0.
        identity: What it belongs to.
        size_bytes: Of its file.
        sha256: Of its file.
        tokens: How many it holds.
        tokens_sha256: Of the tokens.
        ctx_slot: Tokens a slot had room for when it was saved.
        fingerprint: What the proxy calls the conversation, a word of its own that says nothing to
            us; empty where it did not know any.
        saved_at: When it was saved.
        used_at: When it was last used, as far as known: of those saved together, later is later.
    """

    name: str
    model: str
    replica: int
    identity: CacheKey
    size_bytes: int
    sha256: str
    tokens: int
    tokens_sha256: str
    ctx_slot: int
    fingerprint: str
    saved_at: datetime
    used_at: datetime


@dataclass(frozen=True, slots=True)
class SlotOrigin:
    """Whose a slot file is, before it is known what is in it; the fields are those of Manifest."""

    model: str
    replica: int
    identity: CacheKey
    ctx_slot: int
    fingerprint: str
    saved_at: datetime
    used_at: datetime

    def manifest(
        self, name: str, moved: SlotFileInfo, head: SlotFileHeader, sha256: str
    ) -> Manifest:
        """Return the manifest of a file.

        Args:
            name: Of the file, without an ending.
            moved: Its size and number of tokens.
            head: Its head.
            sha256: Of all of it.
        """
        return Manifest(
            name=name,
            model=self.model,
            replica=self.replica,
            identity=self.identity,
            size_bytes=moved.size_bytes,
            sha256=sha256,
            tokens=moved.tokens,
            tokens_sha256=head.digest,
            ctx_slot=self.ctx_slot,
            fingerprint=self.fingerprint if len(self.fingerprint) <= _CHAIN_MAX_CHARACTERS else "",
            saved_at=self.saved_at,
            used_at=self.used_at,
        )


def cache_key(plan: Plan) -> CacheKey:
    """Return what a cache made by a plan belongs to. Looks at the files that its options name."""
    words = (" ".join(filter(None, (line.flag, _stamped(line.value)))) for line in plan.lines)
    return CacheKey(
        model=plan.gguf.fingerprint,
        engine=f"{plan.engine.version}, {_size(plan.engine.path)} bytes",
        options=tuple(word for word in words if word.split()[0] not in _WITHOUT_EFFECT),
    )


def dump(manifest: Manifest) -> str:
    """Return a manifest as text."""
    content = _content(manifest)
    return json.dumps({**content, "check": _check(content)}, indent=1)


def load(text: str) -> Manifest:
    """Return the manifest that a text is.

    Raises:
        ManifestInvalid: It is none, of another format, or was altered.
    """
    try:
        content = json.loads(text)
        if content.pop("check") != _check(content):
            raise ManifestInvalid("its manifest was altered")
        if content.pop("format") != FORMAT:
            raise ManifestInvalid("its manifest is of another version of ours")
        return _manifest(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestInvalid(f"its manifest cannot be read: {error}") from error


def _content(manifest: Manifest) -> dict[str, Any]:
    content = asdict(manifest) | {"format": FORMAT}
    for when in ("saved_at", "used_at"):
        content[when] = content[when].isoformat()
    return content


def _manifest(content: dict[str, Any]) -> Manifest:
    identity = content["identity"]
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


def _stamped(value: str | None) -> str | None:
    """Return an option's value; of one that names a file, with what tells it from another."""
    if value is None or "/" not in value or not is_regular(Path(value)):
        return value
    found = Path(value).stat()
    return f"{value} ({found.st_size} bytes, {found.st_mtime_ns})"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
