from __future__ import annotations

import struct
from pathlib import Path

import gguf as package
import pytest
from support import tiny_eagle, tiny_gguf, tiny_hybrid

from supervisor.errors import ModelInvalid
from supervisor.models.metadata import Gguf, read
from supervisor.models.tensors import FILE_TYPES, GGML_TYPES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.make(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def broken(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_metadata_of_a_model_is_read(tiny: Path, cache: Path) -> None:
    found = read(tiny, cache_dir=cache)
    assert (found.architecture, found.name, found.quantisation) == ("llama", "tiny random", "F16")
    assert (found.layers, found.heads, found.kv_heads) == (2, 2, (2, 2))
    assert (found.key_length, found.value_length, found.embedding_length) == (32, 32, 64)
    assert (found.ctx_train, found.tokenizer) == (2048, "llama")
    assert found.chat_template == tiny_gguf.CHAT_TEMPLATE
    assert (found.sliding_window, found.recurrent, found.shards) == (None, False, 1)
    assert found.size_bytes == tiny.stat().st_size


def test_it_agrees_with_the_gguf_package(tiny: Path, cache: Path) -> None:
    found, theirs = read(tiny, cache_dir=cache), package.GGUFReader(tiny)
    assert found.parameters == sum(int(tensor.n_elements) for tensor in theirs.tensors)
    assert found.tensor_bytes == sum(int(tensor.n_bytes) for tensor in theirs.tensors)
    assert found.vocab_size == len(theirs.fields["tokenizer.ggml.tokens"].data)


def test_a_model_without_a_template_has_none(tmp_path: Path, cache: Path) -> None:
    path = tiny_gguf.make(tmp_path / "plain.gguf", chat_template=None)
    assert read(path, cache_dir=cache).chat_template is None


def test_grouped_query_attention_is_read(tmp_path: Path, cache: Path) -> None:
    path = tiny_gguf.make(tmp_path / "grouped.gguf", heads=4, kv_heads=2, layers=3)
    assert read(path, cache_dir=cache).kv_heads == (2, 2, 2)


def test_metadata_is_cached_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = tiny_gguf.make(tmp_path / "model.gguf")
    first = read(path, cache_dir=cache)
    assert read(path, cache_dir=cache) == first
    tiny_gguf.make(path, mode="cycle", layers=3)
    assert read(path, cache_dir=cache).layers == 3


def test_an_invalid_cache_entry_is_replaced(tiny: Path, cache: Path) -> None:
    first = read(tiny, cache_dir=cache)
    for file in (cache / "models").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_text('{"layers": 7}')
    assert read(tiny, cache_dir=cache) == first


def test_an_unwritable_cache_is_ignored(tiny: Path, tmp_path: Path) -> None:
    blocked = broken(tmp_path / "file", b"")
    assert read(tiny, cache_dir=blocked).layers == 2


def test_two_models_of_one_shape_have_two_fingerprints(tmp_path: Path, cache: Path) -> None:
    prints = {
        read(tiny_gguf.make(tmp_path / f"{seed}.gguf", seed=seed), cache_dir=cache).fingerprint
        for seed in (1, 2)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello, I am a text", "is not a GGUF file"),
        (b"GGUF", "its header does not end"),
        (b"GGUF" + struct.pack("<I", 9), "GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "its header does not end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "its header does not end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50), "its header does not end"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
    ],
)
def test_an_invalid_file_is_rejected_in_one_line(
    tmp_path: Path, cache: Path, content: bytes, said: str
) -> None:
    path = broken(tmp_path / "broken.gguf", content)
    with pytest.raises(ModelInvalid, match=said) as caught:
        read(path, cache_dir=cache)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_truncated_anywhere_is_rejected(tiny: Path, tmp_path: Path, cache: Path) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(1, 400, 13), *range(400, len(whole), 9973), len(whole) - 1]:
        with pytest.raises(ModelInvalid):
            read(broken(path, whole[:size]), cache_dir=cache)


def test_truncated_weights_are_reported_with_their_size(
    tiny: Path, tmp_path: Path, cache: Path
) -> None:
    path = broken(tmp_path / "cut.gguf", tiny.read_bytes()[:-1000])
    with pytest.raises(ModelInvalid, match=r"is truncated: it has [\d,]+ of at least [\d,]+ bytes"):
        read(path, cache_dir=cache)


def test_missing_files_and_directories_are_rejected(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"model file .* not found"):
        read(tmp_path / "none.gguf", cache_dir=cache)
    with pytest.raises(ModelInvalid, match="is a directory"):
        read(tmp_path, cache_dir=cache)


def sharded(directory: Path, tiny: Path, count: int) -> list[Path]:
    paths = [directory / f"big-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for path in paths:
        path.write_bytes(tiny.read_bytes())
    return paths


def test_all_shards_are_counted(tiny: Path, tmp_path: Path, cache: Path) -> None:
    first, *_ = sharded(tmp_path, tiny, 2)
    found = read(first, cache_dir=cache)
    assert (found.shards, found.size_bytes) == (2, 2 * tiny.stat().st_size)


def test_a_later_shard_names_the_first(tiny: Path, tmp_path: Path, cache: Path) -> None:
    first, second = sharded(tmp_path, tiny, 2)
    with pytest.raises(ModelInvalid, match="is a later shard") as caught:
        read(second, cache_dir=cache)
    assert str(first) in (caught.value.hint or "")


def test_a_missing_shard_is_named(tiny: Path, tmp_path: Path, cache: Path) -> None:
    first, second = sharded(tmp_path, tiny, 2)
    second.unlink()
    with pytest.raises(ModelInvalid, match=r"model file .*00002-of-00002.gguf not found"):
        read(first, cache_dir=cache)


@pytest.mark.parametrize(("number", "said"), [(1, "is a later shard"), (0, "is one of 3 shards")])
def test_a_renamed_shard_is_recognised_by_its_metadata(
    tmp_path: Path, cache: Path, number: int, said: str
) -> None:
    writer = package.GGUFWriter(tmp_path / "renamed.gguf", "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelInvalid, match=said):
        read(tmp_path / "renamed.gguf", cache_dir=cache)


def test_recurrent_state_and_sliding_windows_are_read(tmp_path: Path, cache: Path) -> None:
    writer = package.GGUFWriter(tmp_path / "hybrid.gguf", "hybrid")
    writer.add_uint32("hybrid.block_count", 3)
    writer.add_uint32("hybrid.attention.head_count", 4)
    writer.add_array("hybrid.attention.head_count_kv", [0, 2, 0])
    writer.add_uint32("hybrid.attention.sliding_window", 512)
    writer.add_uint32("hybrid.ssm.state_size", 16)
    writer.add_uint32("general.file_type", 999)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found: Gguf = read(tmp_path / "hybrid.gguf", cache_dir=cache)
    assert (found.kv_heads, found.sliding_window, found.recurrent) == ((0, 2, 0), 512, True)
    assert found.quantisation == "unknown"


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("lfm2", {"shortconv.l_cache": 3}, ((0, 2, 0), 2 * 2 * 64)),
        (
            "qwen35",
            {"full_attention_interval": 2, "ssm.inner_size": 32, "ssm.conv_kernel": 4},
            ((0, 2, 0), 2 * 3 * 32),
        ),
        ("jamba", {"ssm.inner_size": 32, "ssm.state_size": 16}, ((2, 2, 2), 3 * 32 * 16)),
    ],
)
def test_the_state_of_each_kind_of_recurrent_layer_is_read(
    tmp_path: Path, cache: Path, name: str, sizes: dict[str, int], expected: object
) -> None:
    writer = package.GGUFWriter(tmp_path / "hybrid.gguf", name)
    common = {"block_count": 3, "attention.head_count": 2, "embedding_length": 64}
    for key, number in (common | sizes).items():
        writer.add_uint32(f"{name}.{key}", number)
    if name == "lfm2":
        writer.add_array("lfm2.attention.head_count_kv", [0, 2, 0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read(tmp_path / "hybrid.gguf", cache_dir=cache)
    assert found.recurrent
    assert (found.kv_heads, found.state_values) == expected


def test_a_layer_that_drafts_has_no_separate_cache(tmp_path: Path, cache: Path) -> None:
    found = read(tiny_hybrid.make(tmp_path / "a.gguf", drafts=True), cache_dir=cache)
    assert (found.layers, found.kv_heads) == (3, (0, 2, 0))
    assert found.state_values == 3 * (32 + 2 * 2 * 16) + 32 * 16
    assert (found.draft_layers, found.drafts_for) == (1, 0)
    whole = read(tiny_hybrid.make(tmp_path / "b.gguf"), cache_dir=cache)
    assert (whole.draft_layers, whole.drafts_for) == (0, 0)


def test_a_file_of_draft_heads_names_the_width_of_its_model(tmp_path: Path, cache: Path) -> None:
    eagle = read(tiny_eagle.make(tmp_path / "eagle.gguf", target=128), cache_dir=cache)
    assert (eagle.draft_layers, eagle.drafts_for) == (0, 128)
    mtp = read(tiny_hybrid.make_drafts(tmp_path / "mtp.gguf"), cache_dir=cache)
    assert (mtp.draft_layers, mtp.drafts_for) == (1, 64)


def test_the_type_tables_match_the_gguf_package() -> None:
    sizes = {
        kind.value: (kind.name, *package.GGML_QUANT_SIZES[kind])
        for kind in package.GGMLQuantizationType
    }
    assert dict(GGML_TYPES) == sizes
    names = {kind.value: kind.name.split("_", 1)[-1] for kind in package.LlamaFileType}
    assert dict(FILE_TYPES) == names
