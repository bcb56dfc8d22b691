"""Chooses how a model drafts: with a configured draft model, a file beside it, or its own layers.

Draft heads are layers that were trained to draft for a certain model. A model may have them at its
end (multi-token prediction, MTP), or a separate file has its MTP layers, or an EAGLE-3, DFlash or
DSpark head, which reads the states of some layers of the model.

`draft = "auto"` takes draft heads of this model in its directory or in `MTP` below; without any, it
takes the smallest GGUF with the same vocabulary and at most a quarter of the size, the first by
name. The size of a model is that of the weights that one token reads: its speed follows them, and
with experts they are few. A profile whose `spec-type` is `auto` takes draft heads even without that
setting.

Source: llama.cpp, common/speculative.cpp, and the models that have a graph_mtp; builds 10434 and
11434.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from supervisor.builds.help import MTP, Flags
from supervisor.errors import ModelInvalid, SettingsInvalid
from supervisor.models import gguf as gguf_module
from supervisor.models import metadata
from supervisor.models.gguf import Header
from supervisor.models.metadata import Gguf
from supervisor.models.tensors import DFLASH
from supervisor.output import size
from supervisor.system import files
from supervisor.system.files import open_regular, stat_regular

# A vocabulary is reduced to its tokenizer, its size, its BOS and EOS tokens, and digests of its
# first tokens: one for each of the last 129 lengths, because vocabularies whose sizes differ by up
# to 128 fit if their common tokens are equal. The digests are cached, so that a comparison of two
# models need not read the files again.
#
# Source: llama.cpp, common/speculative.cpp, common_speculative_are_compatible, and
# SPEC_VOCAB_MAX_SIZE_DIFFERENCE and SPEC_VOCAB_CHECK_START_TOKEN_ID there; docs/gguf.md for the
# keys.

_CACHE_VERSION: Final = "vocabulary 1"
_TOKENS: Final = "tokenizer.ggml.tokens"
_DIFFERENCE_MAX: Final = 128
# Earlier tokens are control tokens, which may be named differently.
_FIRST_COMPARED: Final = 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    kind: str  # the kind of tokenizer, such as `gpt2`
    size: int
    begin: int | None  # the token added before a text, or None
    end: int | None  # the token added after a text, or None
    # Digests of the tokens from the sixth on, up to each of the last 129 lengths, ascending.
    digests: tuple[str, ...]

    def digest(self, length: int) -> str:
        """Return the digest of the first `length` tokens, one of the last 129 lengths."""
        return self.digests[length - self.size - 1]


def read(path: Path, *, cache_dir: Path) -> Vocabulary:
    try:
        key = files.key_of((path,), _CACHE_VERSION)
        cached = files.get(cache_dir / "vocabularies", key)
        if cached and cached.keys() == {field.name for field in dataclasses.fields(Vocabulary)}:
            return Vocabulary(**cached | {"digests": tuple(cached["digests"])})
        with open_regular(path) as file:
            found = _vocabulary(gguf_module.read(file, str(path), strings_of=_TOKENS))
    except OSError as error:
        raise ModelInvalid(
            f"{path} cannot be read: {error.strerror}", hint="check its path and permissions"
        ) from error
    files.put(cache_dir / "vocabularies", key, dataclasses.asdict(found))
    return found


def misfit(model: Vocabulary, draft: Vocabulary) -> str | None:
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
        begin=_added_token(found.metadata, "bos", 1 if kind == "llama" else None),
        end=_added_token(found.metadata, "eos", None),
        digests=_digests(found.strings),
    )


def _added_token(metadata: Mapping[str, object], name: str, default: int | None) -> int | None:
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default is not None):
        return None
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return found if isinstance(found, int) else None


def _digests(tokens: Sequence[bytes]) -> tuple[str, ...]:
    digest = hashlib.blake2b(digest_size=8)
    first_kept = max(0, len(tokens) - _DIFFERENCE_MAX)
    found = []
    for length in range(len(tokens) + 1):
        if length >= first_kept:
            found.append(digest.hexdigest())
        if _FIRST_COMPARED <= length < len(tokens):
            token = tokens[length]
            digest.update(len(token).to_bytes(8, "little") + token)
    return tuple(found)


SIMPLE: Final = "draft-simple"
DSPARK: Final = "draft-dspark"

# Files of other architectures may have such layers too, but the engine does not use them.
_MTP_ARCHITECTURES: Final = frozenset(
    {"cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "hy_v3", "mimo2"}
    | {"nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"}
)


def offered_types(flags: Flags) -> tuple[str, ...]:
    found = flags.find("spec-type")
    return found.choices if found else ()


def draft_type(draft: Gguf) -> str:
    """Return the value of `--spec-type` for a draft file."""
    if draft.architecture == "eagle3":
        return "draft-eagle3"
    if draft.architecture == DFLASH:
        return DSPARK if draft.has_markov_head else "draft-dflash"
    return MTP if draft.drafts_for else SIMPLE


def usable_type(draft: Gguf | None, model: Gguf, spec_types: Collection[str]) -> str | None:
    """Return the type of the draft model or of the model's own draft layers, or None."""
    if draft:
        return draft_type(draft)
    has_own = model.draft_layers and reason_against_mtp(model, spec_types) is None
    return MTP if has_own else None


def head_misfit(head: Gguf, model: Gguf) -> str | None:
    if draft_type(head) == MTP and head.architecture != model.architecture:
        return f"it drafts for {head.architecture}, not {model.architecture}"
    if head.drafts_for != model.embedding_length:
        return f"it drafts for a model of width {head.drafts_for}, not {model.embedding_length}"
    return None


def reason_against_mtp(model: Gguf, spec_types: Collection[str]) -> str | None:
    """Return why a build with these types cannot use a model's draft layers, or None."""
    if MTP not in spec_types:
        return "this build cannot draft with the model's own layers"
    if model.architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp is not known to draft with layers of {model.architecture}"
    return None


AUTO: Final = "auto"
# A draft model is at most 1/4 of its model, because it must be much faster.
_SMALLER: Final = 4
# A draft model that the user sets may be larger, up to this share: above it, drafting only costs.
_SHARE_MAX: Final = 0.5
# Files examined, by name; a directory may contain all models of a machine.
_FILES_MAX: Final = 64
# Directories for draft heads in repositories such as unsloth's.
_DRAFT_DIRECTORIES: Final = ("MTP", "mtp")

DraftSetting = Path | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model, or a clause with the reason for its absence, and sentences for the user."""

    gguf: Gguf | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()


def no_draft(reason: str, fix: str | None = None) -> Draft:
    """The model runs without the draft model that is set."""
    sentence = "; ".join(filter(None, (reason, fix)))
    return Draft(reason=reason, warnings=(f"the model runs without its draft model: {sentence}",))


def choose(
    setting: DraftSetting,
    model: Gguf,
    *,
    cache_dir: Path,
    spec_types: Collection[str] = (),
    takes_heads: bool = False,
) -> Draft:
    """Choose the draft model; reads files or their cached metadata.

    `spec_types` are the build's drafting types; `takes_heads` takes draft heads beside the model if
    nothing is set. Raises SettingsInvalid: the configured draft model has another vocabulary, or
    more than half of the model's size.
    """
    if isinstance(setting, Path):
        return _read_draft(setting, model, cache_dir)
    if setting is None and (not takes_heads or model.draft_layers):
        return Draft()
    skipped: list[str] = []
    beside = _neighbours(model, cache_dir, skipped)
    fitting = [found for found in beside if not _misfit(found, model, cache_dir)]
    if heads := [gguf for gguf in fitting if gguf.drafts_for and draft_type(gguf) in spec_types]:
        return Draft(_smallest(heads), "draft heads of this model beside it", tuple(skipped))
    if setting is None:
        return Draft()
    return replace(_smaller_model(model, fitting), warnings=tuple(skipped))


def _read_draft(path: Path, model: Gguf, cache_dir: Path) -> Draft:
    try:
        found = metadata.read(path, cache_dir=cache_dir)
    except ModelInvalid as error:
        return no_draft(error.message.replace("model file", "its file", 1))
    if misfit := _misfit(found, model, cache_dir):
        raise SettingsInvalid(
            f"{path} cannot draft for {model.path}: {misfit}",
            hint='use a smaller model of the same family, or none; draft = "auto" looks for one',
        )
    if not found.drafts_for and found.token_bytes > _SHARE_MAX * model.token_bytes:
        drafting, own = size(found.token_bytes), size(model.token_bytes)
        raise SettingsInvalid(
            f"{path} is too large to draft for {model.path}: each token reads {drafting} of its "
            f"weights, and {own} of the model's; drafting pays only if the draft is much faster",
            hint="use one of a quarter of the model's size or less; flags.spec-draft-model names "
            "one of any size",
        )
    return Draft(found)


def _smaller_model(model: Gguf, fitting: Sequence[Gguf]) -> Draft:
    most_bytes = model.token_bytes / _SMALLER
    small = [gguf for gguf in fitting if not gguf.drafts_for and gguf.token_bytes <= most_bytes]
    if not small:
        where = model.path.parent
        reason = f"{where} has no GGUF of its vocabulary and at most a quarter of its size"
        return Draft(None, reason)
    among = f", of {len(small)} candidates" if len(small) > 1 else ""
    reason = f"the smallest GGUF of the same vocabulary beside the model{among}"
    return Draft(_smallest(small), reason)


def _smallest(fitting: Sequence[Gguf]) -> Gguf:
    return min(fitting, key=lambda candidate: (candidate.token_bytes, candidate.path.name))


def _neighbours(model: Gguf, cache_dir: Path, skipped: list[str]) -> Iterator[Gguf]:
    """Yield smaller models and draft heads; notes unreadable files in `skipped`."""
    directory = model.path.parent
    below = (path for name in _DRAFT_DIRECTORIES for path in directory.glob(f"{name}/*.gguf"))
    for path in sorted([*directory.glob("*.gguf"), *below])[:_FILES_MAX]:
        if metadata.is_later_shard(path):
            continue
        try:
            if stat_regular(path).st_size >= model.size_bytes:
                continue
            found = metadata.read(path, cache_dir=cache_dir)
        except ModelInvalid as error:  # damaged, or incomplete
            skipped.append(f"not a draft for {model.path.name}: {error.message}")
        except OSError as error:
            skipped.append(f"not a draft for {model.path.name}: {path} {error.strerror}")
        else:
            if found.layers:  # a projector has none
                yield found


def _misfit(draft: Gguf, model: Gguf, cache_dir: Path) -> str | None:
    if draft.drafts_for and (reason := head_misfit(draft, model)):
        return reason
    return misfit(read(model.path, cache_dir=cache_dir), read(draft.path, cache_dir=cache_dir))
