"""The choice of the draft model, and its vocabulary."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_eagle, tiny_gguf, tiny_moe
from support.samples import model

from supervisor.errors import ModelInvalid, SettingsInvalid
from supervisor.models import metadata
from supervisor.models.metadata import Gguf
from supervisor.output import size
from supervisor.plan.draft import (
    AUTO,
    Draft,
    Vocabulary,
    choose,
    draft_type,
    head_misfit,
    misfit,
    read,
    reason_against_mtp,
    usable_type,
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a directory with a model several times as large as the tiny ones."""
    directory = tmp_path / "models"
    directory.mkdir()
    tiny_gguf.make(directory / "chat.gguf", embd=256, heads=8, layers=4, ff=512)
    return directory


@pytest.fixture
def chat(models: Path, cache: Path) -> Gguf:
    return metadata.read(models / "chat.gguf", cache_dir=cache)


# Vocabularies


def vocabulary(*, extra: int, directory: Path) -> Vocabulary:
    path = tiny_gguf.make(directory / f"{extra}.gguf", extra_tokens=extra)
    return read(path, cache_dir=directory / "cache")


def test_a_vocabulary_is_read_once_and_cached(tiny_model: Path, cache: Path) -> None:
    first = read(tiny_model, cache_dir=cache)
    assert (first.kind, first.begin, first.end) == ("llama", 1, None)
    assert len(first.digests) == 129
    (kept,) = (cache / "vocabularies").iterdir()
    assert read(tiny_model, cache_dir=cache) == first
    kept.write_text('{"size": 1}')
    assert read(tiny_model, cache_dir=cache) == first


@pytest.mark.parametrize(("extra", "fits"), [(0, True), (1, True), (128, True), (129, False)])
def test_sizes_may_differ_as_far_as_the_engine_allows(
    tmp_path: Path, extra: int, *, fits: bool
) -> None:
    model, draft = (vocabulary(extra=count, directory=tmp_path) for count in (0, extra))
    assert (misfit(model, draft) is None) == fits
    assert (misfit(draft, model) is None) == fits


def test_tokens_from_the_sixth_on_must_be_the_same(tmp_path: Path, tiny_model: Path) -> None:
    ours = read(tiny_model, cache_dir=tmp_path / "cache")
    for name, token, fits in (("control", b"</s>", True), ("letter", b"\xe2\x96\x81the", False)):
        changed = tiny_model.read_bytes().replace(token, token[:-1] + b"X", 1)
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(changed)
        assert (misfit(ours, read(path, cache_dir=tmp_path / "cache")) is None) == fits


def test_bos_and_eos_must_be_the_same(tiny_model: Path, cache: Path) -> None:
    ours = read(tiny_model, cache_dir=cache)
    assert misfit(ours, replace(ours, begin=None))
    assert misfit(ours, replace(ours, end=4))
    assert misfit(ours, replace(ours, kind="gpt2")) == "it has a gpt2 tokenizer, the model llama"


def test_an_invalid_file_has_no_vocabulary(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelInvalid, match="cannot be read"):
        read(tmp_path / "none.gguf", cache_dir=cache)


# Drafts


def test_the_configured_draft_is_used(chat: Gguf, tiny_model: Path, cache: Path) -> None:
    found = choose(tiny_model, chat, cache_dir=cache)
    assert found == Draft(metadata.read(tiny_model, cache_dir=cache))
    assert choose(None, chat, cache_dir=cache) == Draft()


def test_a_model_runs_without_a_draft_that_cannot_be_read(
    chat: Gguf, tmp_path: Path, cache: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    for path, reason in ((tmp_path / "gone.gguf", "not found"), (damaged, "damaged")):
        found = choose(path, chat, cache_dir=cache)
        assert found.gguf is None
        assert reason in found.reason
        (warning,) = found.warnings
        assert warning.startswith("the model runs without its draft model: ")
        assert str(path) in warning


def test_a_draft_that_is_hardly_smaller_is_refused_with_the_sizes(chat: Gguf, cache: Path) -> None:
    its = size(chat.token_bytes)
    with pytest.raises(SettingsInvalid, match=f"reads {its} of its weights, and {its} of the"):
        choose(chat.path, chat, cache_dir=cache)


def test_of_experts_only_those_that_a_token_uses_are_compared(tmp_path: Path, cache: Path) -> None:
    sizes = tiny_moe.Size(layers=2, experts=32, used=2)
    path = tiny_moe.make(tmp_path / "experts.gguf", "qwen3moe", sizes)
    experts = metadata.read(path, cache_dir=cache)
    less, more, most = (
        metadata.read(
            tiny_gguf.make(tmp_path / f"{width}.gguf", embd=width, heads=8, layers=2, ff=4 * width),
            cache_dir=cache,
        )
        for width in (128, 256, 512)
    )
    used = sum(size for name, size in experts.tensors if "_exps." in name) // 16
    rest = sum(size for name, size in experts.tensors if "_exps." not in name)
    assert experts.token_bytes == used + rest
    assert more.tensor_bytes < experts.tensor_bytes / 2
    with pytest.raises(SettingsInvalid, match="is too large to draft for"):
        choose(more.path, experts, cache_dir=cache)
    assert choose(less.path, experts, cache_dir=cache).gguf == less
    # Its weights are as large as those of the model, but a token reads few of them.
    assert choose(experts.path, most, cache_dir=cache).gguf == experts


def test_a_draft_with_another_vocabulary_is_rejected(
    chat: Gguf, tmp_path: Path, cache: Path
) -> None:
    other = tiny_gguf.make(tmp_path / "other.gguf", extra_tokens=200)
    with pytest.raises(SettingsInvalid, match=r"cannot draft for .*chat.gguf: it has 604 tokens"):
        choose(other, chat, cache_dir=cache)


def test_auto_takes_the_smallest_beside_the_model(chat: Gguf, models: Path, cache: Path) -> None:
    tiny_gguf.make(models / "b.gguf")
    tiny_gguf.make(models / "c.gguf")
    tiny_gguf.make(models / "a-larger.gguf", layers=4)
    tiny_gguf.make(models / "a-other.gguf", extra_tokens=200, layers=1)
    (models / "a-broken.gguf").write_bytes(b"GGUF")
    found = choose(AUTO, chat, cache_dir=cache)
    assert found.gguf
    assert found.gguf.path.name == "b.gguf"
    assert "of 3 candidates" in found.reason


def test_auto_skips_models_of_similar_size(chat: Gguf, models: Path, cache: Path) -> None:
    shutil.copy(models / "chat.gguf", models / "copy.gguf")
    found = choose(AUTO, chat, cache_dir=cache)
    assert found.gguf is None
    assert "no GGUF of its vocabulary" in found.reason


# Draft heads

HEADS = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")


@pytest.fixture
def alphabet(models: Path, cache: Path) -> Gguf:
    path = tiny_gguf.make(models / "alphabet.gguf", mode="cycle", layers=4, ff=512)
    return metadata.read(path, cache_dir=cache)


def test_draft_heads_beside_the_model_are_taken_before_another_model(
    alphabet: Gguf, models: Path, cache: Path
) -> None:
    tiny_gguf.make(models / "small.gguf", layers=1)
    tiny_eagle.make(models / "eagle.gguf")
    tiny_eagle.make(models / "wide.gguf", target=128)
    for setting in (AUTO, None):
        found = choose(setting, alphabet, cache_dir=cache, spec_types=HEADS, takes_heads=True)
        assert found.gguf
        assert (found.gguf.path.name, draft_type(found.gguf)) == ("eagle.gguf", "draft-eagle3")
        assert found.reason == "draft heads of this model beside it"


@pytest.mark.parametrize(
    ("made", "kind", "sure"),
    [
        ({}, "draft-dflash", True),
        ({"markov": True}, "draft-dspark", False),
        ({"markov": True, "confidence": True}, "draft-dspark", True),
    ],
    ids=["dflash", "dspark", "dspark with confidence"],
)
def test_heads_that_draft_a_block_at_once_are_recognised(
    alphabet: Gguf,
    models: Path,
    cache: Path,
    made: dict[str, bool],
    kind: str,
    *,
    sure: bool,
) -> None:
    tiny_eagle.make_flash(models / "head.gguf", **made)
    tiny_eagle.make_flash(models / "wide.gguf", target=128, **made)
    found = choose(AUTO, alphabet, cache_dir=cache, spec_types=HEADS).gguf
    assert found
    assert (found.path.name, draft_type(found), found.kind) == ("head.gguf", kind, "draft")
    assert found.has_confidence_head is sure


def test_draft_heads_may_be_in_a_separate_directory(
    alphabet: Gguf, models: Path, cache: Path
) -> None:
    (models / "MTP").mkdir()
    heads = tiny_eagle.make(models / "MTP" / "mtp-eagle.gguf")
    found = choose(AUTO, alphabet, cache_dir=cache, spec_types=HEADS)
    assert found.gguf
    assert found.gguf.path == heads


def test_draft_heads_are_left_out_without_a_setting_or_if_the_build_cannot_use_them(
    alphabet: Gguf, models: Path, cache: Path
) -> None:
    tiny_eagle.make(models / "eagle.gguf")
    (models / "broken.gguf").write_bytes(b"GGUF")
    assert choose(None, alphabet, cache_dir=cache, spec_types=HEADS) == Draft()
    assert choose(None, alphabet, cache_dir=cache, takes_heads=True) == Draft()
    assert choose(AUTO, alphabet, cache_dir=cache).gguf is None


def test_heads_may_be_larger_than_half_of_their_model(models: Path, cache: Path) -> None:
    path = tiny_gguf.make(models / "small.gguf", mode="cycle", layers=1, ff=32)
    small = metadata.read(path, cache_dir=cache)
    heads = metadata.read(tiny_eagle.make(models / "eagle.gguf"), cache_dir=cache)
    assert heads.token_bytes > small.token_bytes / 2
    assert choose(heads.path, small, cache_dir=cache).gguf == heads


def test_heads_of_another_model_are_rejected(alphabet: Gguf, models: Path, cache: Path) -> None:
    wide = tiny_eagle.make(models / "wide.gguf", target=128)
    with pytest.raises(SettingsInvalid, match="drafts for a model of width 128, not 64"):
        choose(wide, alphabet, cache_dir=cache)


def test_mtp_layers_alone_belong_to_one_architecture() -> None:
    whole = model(architecture="qwen35", embedding_length=64)
    head = replace(whole, drafts_for=64, draft_layers=1)
    assert draft_type(head) == "draft-mtp"
    assert head_misfit(head, whole) is None
    assert head_misfit(head, replace(whole, architecture="qwen3next"))
    assert draft_type(whole) == "draft-simple"


@pytest.mark.parametrize(
    ("architecture", "types", "reason"),
    [
        ("qwen35", HEADS, None),
        ("glm4moe", HEADS, "not known to draft with layers of glm4moe"),
        ("qwen35", ("draft-simple",), "this build cannot draft"),
    ],
)
def test_layers_of_the_models_own_draft_where_the_build_can(
    architecture: str, types: tuple[str, ...], reason: str | None
) -> None:
    found = reason_against_mtp(model(architecture=architecture, draft_layers=1), types)
    assert (reason or "") in (found or "")
    assert bool(found) == bool(reason)
    own = model(architecture=architecture, draft_layers=1)
    assert usable_type(None, own, types) == (None if reason else "draft-mtp")


def test_a_draft_model_comes_before_layers_of_the_models_own() -> None:
    own = model(architecture="qwen35", draft_layers=1)
    assert usable_type(model(), own, HEADS) == "draft-simple"
    assert usable_type(None, model(), HEADS) is None
