"""Whether a draft model speaks the vocabulary of the model it drafts for.

A vocabulary is told by its kind, its size, what it begins and ends a text with, and digests of its
first tokens: one for each of the last 129 lengths, because two that differ by up to 128 tokens fit
as long as those they share are the same. The digests are kept in the cache directory, so that
comparing two models reads neither of them again.

Source: llama.cpp, common/speculative.cpp, common_speculative_are_compatible, and
SPEC_VOCAB_MAX_SIZE_DIFFERENCE and SPEC_VOCAB_CHECK_START_TOKEN_ID there; docs/gguf.md for the keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import ModelInvalid
from supervisor.gguf import header
from supervisor.gguf.header import Header
from supervisor.host import json_cache
from supervisor.host.files import open_regular

_CACHE_VERSION: Final = "vocabulary 1"
_TOKENS: Final = "tokenizer.ggml.tokens"
_DIFFERENCE_MAX: Final = 128
# Tokens before this one are control tokens, which may be named differently.
_FIRST_COMPARED: Final = 5
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What two models must share for one to draft for the other.

    Attributes:
        kind: The kind of tokenizer, such as `gpt2`.
        size: The number of tokens.
        begin: The token that is put before a text, or None where none is.
        end: The token that is put after a text, or None where none is.
        digests: Of all tokens but the first five, cut to each of the last 129 lengths, the shortest
            first; fewer where there are fewer tokens.
    """

    kind: str
    size: int
    begin: int | None
    end: int | None
    digests: tuple[str, ...]

    def digest(self, length: int) -> str:
        """Return the digest of the first so many tokens; of the last 129 lengths only."""
        return self.digests[length - self.size - 1]


def read(path: Path, *, cache_dir: Path) -> Vocabulary:
    """Return the vocabulary of a model.

    Args:
        path: A GGUF file; of a split model, its first shard.
        cache_dir: Where vocabularies are kept between calls; made when missing.

    Raises:
        ModelInvalid: It is missing, no GGUF, or cut short.
    """
    try:
        key = json_cache.key_of((path,), _CACHE_VERSION)
        kept = json_cache.get(cache_dir / "vocabularies", key)
        if kept and kept.keys() == {field.name for field in dataclasses.fields(Vocabulary)}:
            return Vocabulary(**kept | {"digests": tuple(kept["digests"])})
        with open_regular(path) as file:
            found = _vocabulary(header.read(file, str(path), strings_of=_TOKENS))
    except OSError as error:
        raise ModelInvalid(
            f"{path} cannot be read: {error.strerror}", hint="check its path and permissions"
        ) from error
    json_cache.put(cache_dir / "vocabularies", key, dataclasses.asdict(found))
    return found


def misfit(model: Vocabulary, draft: Vocabulary) -> str | None:
    """Return why one cannot draft for the other, or None when it can."""
    if draft.kind != model.kind:
        return f"it has a {draft.kind} tokenizer, the model {model.kind}"
    if abs(draft.size - model.size) > _DIFFERENCE_MAX:
        return f"it knows {draft.size} tokens, the model {model.size}"
    if (draft.begin, draft.end) != (model.begin, model.end):
        return "texts begin or end with another token than the model's"
    shared = min(model.size, draft.size)
    if draft.digest(shared) != model.digest(shared):
        return f"its {shared} tokens are not those of the model"
    return None


def _vocabulary(found: Header) -> Vocabulary:
    kind = found.text("tokenizer.ggml.model")
    return Vocabulary(
        kind=kind,
        size=len(found.strings),
        begin=_added(found.metadata, "bos", 1 if kind == "llama" else None),
        end=_added(found.metadata, "eos", None),
        digests=_digests(found.strings),
    )


def _added(metadata: Mapping[str, object], name: str, otherwise: int | None) -> int | None:
    """Return the token that is put at one end of a text, or None where none is.

    Args:
        metadata: Of the header.
        name: `bos` or `eos`.
        otherwise: What its kind of tokenizer puts there where the header does not say.
    """
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", otherwise is not None):
        return None
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", otherwise)
    return found if isinstance(found, int) else None


def _digests(tokens: Sequence[bytes]) -> tuple[str, ...]:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    first_kept = max(0, len(tokens) - _DIFFERENCE_MAX)
    found = []
    for length in range(len(tokens) + 1):
        if length >= first_kept:
            found.append(digest.hexdigest())
        if _FIRST_COMPARED <= length < len(tokens):
            token = tokens[length]
            digest.update(len(token).to_bytes(8, "little") + token)
    return tuple(found)
