"""Adapts the settings of models that make embeddings or rank texts, or have a projector. Pure.

Texts that are computed together change each other's vectors. Largest difference of an element from
the vector of the text alone, for vectors of length 1, build 10434:

    SmolLM2-135M Q4_1, mean    4 slots, own caches 1.5e-1    4 slots, one cache 6.5e-3    1 slot 0
    a random BERT, cls         4 slots, own caches 5.7e-4    4 slots, one cache 5.7e-4    1 slot 0

If each slot has its own cache, the engine cuts texts of different lengths into pieces of equal
length and pools only the last piece, which is wrong. With a single cache the sums are right, but
rounded differently for each batch size. So texts are computed one at a time and unsplit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from supervisor.builds.help import FlagValue
from supervisor.models.metadata import Gguf
from supervisor.plan.auto import AUTO, ctx_slot, positive, slots
from supervisor.plan.context import Embedding, embedding
from supervisor.plan.setting import CORRAL, Setting, SettingsByFlag, values

_SWITCHES: Final[Mapping[str, str]] = {
    "--embedding": "embedding",
    "--embeddings": "embedding",
    "--rerank": "rerank",
    "--reranking": "rerank",
}
_CTX: Final = 4096


def explicit_purpose(
    settings: SettingsByFlag, args: Sequence[str], model: str, gguf: Gguf
) -> SettingsByFlag:
    """Add the purpose, embedding or ranking, that `args` or the file imply; `args` win."""
    words: dict[str, FlagValue] = {_SWITCHES[word]: True for word in args if word in _SWITCHES}
    for word, value in pairwise(args):
        if word == "--pooling":
            words["pooling"] = value
    given = {key: Setting(value, f"model {model}", "from args") for key, value in words.items()}
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


def embedding_slots(settings: SettingsByFlag, gguf: Gguf) -> SettingsByFlag:
    use = embedding(gguf, values(settings))
    if use is None:
        return settings
    kept = {k: v for k, v in settings.items() if v.is_own or not k.startswith("spec-")}
    wanted = _embedding_defaults(settings, use)
    shape = {**kept, **_without_own(settings, wanted)}
    count = slots(values(shape))
    if count == 1 or use.can_split:
        return shape
    reason = f"with separate caches, {count} slots would return vectors of parts of their texts"
    return {**shape, "kv-unified": Setting(value=True, origin=CORRAL, reason=reason)}


def embedding_batches(settings: SettingsByFlag, gguf: Gguf) -> SettingsByFlag:
    """Set batch sizes that hold the longest input unsplit."""
    chosen = values(settings)
    use = embedding(gguf, chosen)
    if use is None:
        return settings
    ctx = ctx_slot(chosen) or gguf.ctx_train or _CTX
    size: FlagValue = use.micro_batch(ctx)
    if _is_own(settings, "ubatch-size"):
        size = positive("ubatch-size", chosen["ubatch-size"])
    reason = "an input is computed in one piece"
    if use.can_split:
        reason = "the last token is pooled, so inputs may be split"
    sizes = dict.fromkeys(("batch-size", "ubatch-size"), Setting(size, CORRAL, reason))
    return {**settings, **_without_own(settings, sizes)}


def _embedding_defaults(settings: SettingsByFlag, use: Embedding) -> dict[str, Setting]:
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


def _without_own(settings: SettingsByFlag, wanted: Mapping[str, Setting]) -> dict[str, Setting]:
    return {key: setting for key, setting in wanted.items() if not _is_own(settings, key)}


def _is_own(settings: SettingsByFlag, key: str) -> bool:
    return key in settings and settings[key].is_own


FLAG: Final = "mmproj"
# Settings and command-line words by which the user chooses the projector. Source: --help.
_DECIDED: Final = frozenset({FLAG, "mmproj-url", "mmproj-auto", "no-mmproj", "mm", "mmu"})


def needs_projector_search(model: Gguf, flags: Mapping[str, object], args: Sequence[str]) -> bool:
    """Return whether the model generates text and the user did not choose the projector."""
    words = (word.partition("=")[0] for word in args if word.startswith("-"))
    given = {name.lstrip("-") for name in (*flags, *words)}
    return model.is_causal and model.pooling is None and _DECIDED.isdisjoint(given)
