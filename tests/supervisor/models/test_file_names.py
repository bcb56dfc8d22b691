from __future__ import annotations

import pytest

from supervisor.models import file_names
from supervisor.models.file_names import FileKind


@pytest.mark.parametrize(
    ("path", "quantisation", "bits"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M", 4),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", 4),
        ("tinyllama-1.1b-chat-v1.0.Q8_0.gguf", "Q8_0", 8),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M", 4),
        ("Llama-3.1-8B.i1-IQ2_XXS.gguf", "IQ2_XXS", 2),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4", 4),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "F16", 16),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4", 4),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE", 4),
        ("Llama-3.2-1B-Instruct-Q4_0_4_8.gguf", "Q4_0_4_8", 4),
        ("BF16/model-00001-of-00002.gguf", "BF16", 16),
        ("some/TQ1_0/deep.gguf", "TQ1_0", 1),
        ("model-IQ4_NL.gguf", "IQ4_NL", 4),
        ("QwQ-32B.gguf", "", 0),
    ],
)
def test_the_quantisation_is_read_from_the_name_or_its_directory(
    path: str, quantisation: str, bits: int
) -> None:
    found = file_names.parse_file_name(path)
    assert found is not None
    assert (found.quantisation, found.bits, found.kind) == (quantisation, bits, "model")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("mmproj-F16.gguf", "projector"),
        ("gemma-3-4b-it.mmproj-Q8_0.gguf", "projector"),
        ("MTP/mtp-Qwen3.5-27B-Q8_0.gguf", "draft"),
        ("Qwen3-8B-eagle3-BF16.gguf", "draft"),
        ("gemma-4-31b-it-Q8_0-mtp.gguf", "draft"),
        ("Qwen3.imatrix.gguf", "imatrix"),
        ("imatrix_unsloth.gguf", "imatrix"),
        ("Qwen3-8B-lora-f16.gguf", "adapter"),
        ("draft-Q4_0.gguf", "draft"),
        ("Qwen3-DRAFT-0.6B-Q4_0.gguf", "model"),
        ("overdraft-7b-Q8_0.gguf", "model"),
        ("exploration-7b-Q8_0.gguf", "model"),
    ],
)
def test_parts_that_are_no_models_are_recognised(path: str, kind: FileKind) -> None:
    found = file_names.parse_file_name(path)
    assert found is not None
    assert found.kind is kind


def test_other_files_are_none_of_ours() -> None:
    assert file_names.parse_file_name("imatrix.dat") is None
    assert file_names.group(["README.md", "config.json"]) == ()


def test_shards_are_put_together_in_order() -> None:
    groups = file_names.group(
        ["Q8_0/a-00002-of-00002.gguf", "Q8_0/a-00001-of-00002.gguf", "a-Q4_0.gguf"]
    )
    assert [[file.path for file in each.files] for each in groups] == [
        ["Q8_0/a-00001-of-00002.gguf", "Q8_0/a-00002-of-00002.gguf"],
        ["a-Q4_0.gguf"],
    ]
    assert all(group.is_complete for group in groups)


def test_a_missing_shard_makes_a_model_incomplete() -> None:
    (found,) = file_names.group(["a-00002-of-00003.gguf", "a-00003-of-00003.gguf"])
    assert not found.is_complete


def test_the_nearest_projector_is_taken() -> None:
    projectors = [f"small/mmproj-{name}.gguf" for name in ("BF16", "F16", "F32")]
    groups = file_names.group(["big/mmproj-F16.gguf", *projectors, "small/m-Q4_K_M.gguf"])
    model = file_names.parse_file_name("small/m-Q4_K_M.gguf")
    assert model is not None
    found = file_names.companion(groups, model, "projector")
    assert found is not None
    assert found.first.path == "small/mmproj-F16.gguf"
    assert file_names.companion(groups, model, "draft") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        ("Q8_0/big-Q8_0-00001-of-00002.gguf", "big-Q8_0"),
        ("my model (1).gguf", "my-model-1-"),
        ("-.gguf", "model"),
    ],
)
def test_a_file_is_served_by_its_name_without_the_shard(path: str, name: str) -> None:
    assert file_names.model_name(path) == name
