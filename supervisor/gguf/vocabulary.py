"""Whether a draft model's vocabulary fits a model's, decided without keeping either."""

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

# A file's vocabulary is reduced to its tokenizer, its size, its BOS and EOS tokens, and digests of
# its first tokens: one for each of the last 129 lengths, because vocabularies whose sizes differ by
# up to 128 fit if the tokens they share are equal. The digests are cached, so that comparing two
# models reads neither of them again.
#
# Source: llama.cpp, common/speculative.cpp, common_speculative_are_compatible, and
# SPEC_VOCAB_MAX_SIZE_DIFFERENCE and SPEC_VOCAB_CHECK_START_TOKEN_ID there; docs/gguf.md for the
# keys.

_CACHE_VERSION: Final = "vocabulary 1"
_TOKENS: Final = "tokenizer.ggml.tokens"
_DIFFERENCE_MAX: Final = 128
# Earlier tokens are control tokens, which may be named differently.
_FIRST_COMPARED: Final = 5
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary, reduced to its compatibility with others."""

    kind: str  # the kind of tokenizer, such as `gpt2`
    size: int
    begin: int | None  # the token added before a text, or None
    end: int | None  # the token added after a text, or None
    # Of all tokens but the first five, cut to each of the last 129 lengths, the shortest first.
    digests: tuple[str, ...]

    def digest(self, length: int) -> str:
        """Digest of the first `length` tokens, one of the last 129 lengths."""
        return self.digests[length - self.size - 1]


def read(path: Path, *, cache_dir: Path) -> Vocabulary:
    """Read the vocabulary of a model."""
    try:
        key = json_cache.key_of((path,), _CACHE_VERSION)
        cached = json_cache.get(cache_dir / "vocabularies", key)
        if cached and cached.keys() == {field.name for field in dataclasses.fields(Vocabulary)}:
            return Vocabulary(**cached | {"digests": tuple(cached["digests"])})
        with open_regular(path) as file:
            found = _vocabulary(header.read(file, str(path), strings_of=_TOKENS))
    except OSError as error:
        raise ModelInvalid(
            f"{path} cannot be read: {error.strerror}", hint="check its path and permissions"
        ) from error
    json_cache.put(cache_dir / "vocabularies", key, dataclasses.asdict(found))
    return found


def misfit(model: Vocabulary, draft: Vocabulary) -> str | None:
    """Why `draft` cannot draft for `model`, or None."""
    if draft.kind != model.kind:
        return f"it has a {draft.kind} tokenizer, the model {model.kind}"
    if abs(draft.size - model.size) > _DIFFERENCE_MAX:
        return f"it has {draft.size} tokens, the model {model.size}"
    if (draft.begin, draft.end) != (model.begin, model.end):
        return "its BOS or EOS token differs from the model's"
    shared = min(model.size, draft.size)
    if draft.digest(shared) != model.digest(shared):
        return f"its first {shared} tokens differ from the model's"
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


def _added(metadata: Mapping[str, object], name: str, default: int | None) -> int | None:
    """The token added at one end of a text, or None."""
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default is not None):
        return None
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
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
