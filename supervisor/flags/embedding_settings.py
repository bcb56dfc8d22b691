"""Settings of a model that makes embeddings or ranks texts. Pure.

Texts computed together change each other's vectors. Build 10434, largest difference of an element
to the text alone, of vectors of length 1:
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.flags.auto import AUTO, ctx_slot, positive, slots
from supervisor.flags.setting import CORRAL, Setting, Settings, values
from supervisor.gguf.embedding import Embedding, embedding
from supervisor.gguf.metadata import Gguf

#     SmolLM2-135M Q4_1, mean    4 slots, own caches 1.5e-1    4 slots, one cache 6.5e-3    1 slot 0
#     a random BERT, cls         4 slots, own caches 5.7e-4    4 slots, one cache 5.7e-4    1 slot 0
#
# With caches of their own the engine cuts texts of different lengths into pieces of equal length,
# and pools the last piece alone: wrong. With one cache the sums are right, but rounded differently
# for each batch size. So one text is computed at a time, in one piece.

_SWITCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--embedding": "embedding",
        "--embeddings": "embedding",
        "--rerank": "rerank",
        "--reranking": "rerank",
    }
)
_CTX: Final = 4096


def explicit_purpose(settings: Settings, args: Sequence[str], model: str, gguf: Gguf) -> Settings:
    """Make explicit what the file and `args`, which win over settings, say about embeddings."""
    given = {key: Setting(value, f"model {model}", "from args") for key, value in _in(args)}
    found = {**settings, **given}
    if "embedding" in found or "rerank" in found:
        return found
    pooling = found["pooling"].value if "pooling" in found else gguf.pooling
    if pooling is None and gguf.is_causal:
        return found
    key = "rerank" if pooling == "rank" else "embedding"
    reason = f"{gguf.architecture} with pooling {pooling or 'none'} generates no text"
    origin = found["pooling"].origin if "pooling" in found else "gguf"
    return {**found, key: Setting(value=True, origin=origin, reason=reason)}


def embedding_slots(settings: Settings, gguf: Gguf) -> Settings:
    """Adapt the settings of an embedding model before anything is derived."""
    chosen = values(settings)
    use = embedding(gguf, chosen)
    if use is None:
        return settings
    kept = {k: one for k, one in settings.items() if one.is_own or not k.startswith("spec-")}
    wanted = _wanted(settings, use)
    shape = {**kept, **_unless_own(settings, wanted)}
    return {**shape, **_one_cache(shape, use)}


def embedding_batches(settings: Settings, gguf: Gguf) -> Settings:
    """Set batch sizes that hold the longest input in one piece."""
    chosen = values(settings)
    use = embedding(gguf, chosen)
    if use is None:
        return settings
    ctx = ctx_slot(chosen) or gguf.ctx_train or _CTX
    size: FlagValue = use.micro_batch(ctx)
    if _is_own(settings, "ubatch-size"):
        size = positive("ubatch-size", chosen["ubatch-size"])
    reason = (
        "the last token is pooled, so inputs may be split"
        if use.can_split
        else "an input is computed in one piece"
    )
    sizes = dict.fromkeys(("batch-size", "ubatch-size"), Setting(size, CORRAL, reason))
    return {**settings, **_unless_own(settings, sizes)}


def _wanted(settings: Settings, use: Embedding) -> dict[str, Setting]:
    reason = "one text at a time: texts computed together change each other's vectors"
    wanted = {"parallel": Setting(1, CORRAL, reason)}
    for key in ("cache-type-k", "cache-type-v"):
        if key in settings and settings[key].value == AUTO:
            wanted[key] = Setting("f16", CORRAL, "vectors are not rounded, and no text is kept")
    if use.is_only:
        wanted["cache-ram"] = Setting(0, CORRAL, "no text is kept")
    if use.can_split:
        reason = "a prefix shared with the previous text would be rounded differently"
        wanted["cache-prompt"] = Setting(value=False, origin=CORRAL, reason=reason)
    return wanted


def _one_cache(settings: Settings, use: Embedding) -> dict[str, Setting]:
    count = slots(values(settings))
    if count == 1 or use.can_split:
        return {}
    reason = f"with caches of their own, {count} slots would return vectors of parts of their texts"
    return {"kv-unified": Setting(value=True, origin=CORRAL, reason=reason)}


def _in(args: Sequence[str]) -> list[tuple[str, FlagValue]]:
    found: list[tuple[str, FlagValue]] = [
        (_SWITCHES[word], True) for word in args if word in _SWITCHES
    ]
    return [*found, *(("pooling", value) for word, value in pairwise(args) if word == "--pooling")]


def _unless_own(settings: Settings, wanted: Mapping[str, Setting]) -> dict[str, Setting]:
    return {key: one for key, one in wanted.items() if not _is_own(settings, key)}


def _is_own(settings: Settings, key: str) -> bool:
    return key in settings and settings[key].is_own
