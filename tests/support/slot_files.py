"""Slot files and manifests for tests, without an engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from support.instance_harness import RecordingTraffic

from supervisor.engine.client import SlotFileInfo
from supervisor.slot_store.file_index import Catalogue, CataloguedFile
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.slot_file import MAGIC

IDENTITY = CacheKey("model", "b10434", ("--cache-type-k f16",))
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def content(tokens: Sequence[int], *, record: bool = True, after: Sequence[int] = (0,)) -> bytes:
    """Return a slot file of these tokens, as build 10434 writes it or as older ones do."""
    words = (-1, 1, len(tokens), *tokens, *after) if record else tuple(tokens)
    head = struct.pack("<III", MAGIC, 2, len(words))
    return head + struct.pack(f"<{len(words)}i", *words) + b"state" * 100


def write(path: Path, tokens: Sequence[int]) -> SlotFileInfo:
    """Write a slot file, and return the response of an engine for it."""
    path.write_bytes(content(tokens))
    return SlotFileInfo(len(tokens), path.stat().st_size)


def manifest(name: str = "a", minutes: int = 0, **changes: Any) -> Manifest:
    """Return the manifest of a file that was used that long after noon."""
    when = NOON + timedelta(minutes=minutes)
    given = {
        "name": name,
        "model": "chat",
        "replica": 0,
        "identity": IDENTITY,
        "size_bytes": 1000,
        "checksum": "0" * 32,
        "tokens": 300,
        "tokens_sha256": "0" * 64,
        "ctx_slot": 2048,
        "fingerprint": "x y",
        "saved_at": when,
        "used_at": when,
    }
    return Manifest(**{**given, **changes})


def catalogued(name: str = "a", minutes: int = 0, **changes: Any) -> CataloguedFile:
    """Return the same as a daemon knows it."""
    return Catalogue(RecordingTraffic()).add(manifest(name, minutes, **changes))
