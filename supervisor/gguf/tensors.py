"""Sizes of tensors, and properties of layers, from a GGUF header. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from supervisor.gguf.ggml_types import FILE_TYPES, GGML_TYPES, UNKNOWN
from supervisor.gguf.header import Header, Tensor

EMBEDDING: Final = "token_embd.weight"
OUTPUT: Final = "output.weight"
_FIRST_LAYER: Final = "blk.0.attn_norm.weight"
_DRAFT_LAYER: Final = ".nextn.eh_proj.weight"
_CLASSIFIER: Final = "cls.output.weight"
# Repacked layouts interleave rows in groups: AMX tiles of 32, others of eight.
# Source: ggml-cpu/amx/amx.cpp and ggml-cpu/repack.cpp.
_ROW_GROUPS: Final = (32, 8, 1)

# Where the file does not list the layers with a sliding window, llama.cpp derives them from the
# architecture: of every N layers, all but the last have one. Source: llama-model.cpp, load_hparams;
# llama-hparams.cpp, set_swa_pattern. An architecture that is missing here is taken to have no such
# layers, so its KV cache is overestimated.
_PERIODS: Final[Mapping[str, int]] = MappingProxyType(
    {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "olmo2": 4}
)
# Of every N layers, the last has a KV cache and the others have a recurrent state, where the file
# does not say otherwise. Source: llama.cpp, load_arch_hparams of these.
_INTERVALS: Final[Mapping[str, int]] = MappingProxyType(
    {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
)
# Bidirectional models, which generate no text. Source: llama-arch.cpp and the builders of
# llama-model.cpp that make no KV cache.
_ENCODERS: Final = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"}
    | {"jina-bert-v3", "eurobert", "gemma-embedding", "t5encoder", "llama-embed"}
)
# Source: llama.h, llama_pooling_type.
_POOLINGS: Final = ("none", "mean", "cls", "last", "rank")

MatrixBytes = tuple[tuple[str, int, int], ...]


def tensor_bytes(tensor: Tensor) -> int:
    """Size of a tensor; 0 for an unknown type."""
    kind = GGML_TYPES.get(tensor.kind, UNKNOWN)
    return tensor.elements // kind.block_elements * kind.block_bytes


def bytes_of(name: str, tensors: Iterable[Tensor]) -> int:
    return sum(tensor_bytes(one) for one in tensors if one.name == name)


def matrix_bytes(tensors: Sequence[Tensor], *, generates: bool) -> MatrixBytes:
    """Sizes of matrices used in multiplications, by type and the group that divides their rows.

    A model that generates text without an output matrix loads the embedding a second time as one.
    """
    is_tied = generates and all(tensor.name != OUTPUT for tensor in tensors)
    sizes: Counter[tuple[str, int]] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1 and (is_tied or tensor.name != EMBEDDING):
            kind = GGML_TYPES.get(tensor.kind, UNKNOWN).name
            group = next(rows for rows in _ROW_GROUPS if tensor.shape[1] % rows == 0)
            sizes[kind, group] += tensor_bytes(tensor)
    return tuple((kind, group, size) for (kind, group), size in sorted(sizes.items()))


def file_type(number: int) -> str:
    return FILE_TYPES.get(number, UNKNOWN.name)


def is_causal(header: Header, architecture: str) -> bool:
    declared = header.metadata.get(f"{architecture}.attention.causal", True)
    return declared is not False and architecture not in _ENCODERS


def pooling(header: Header, architecture: str, tensors: Iterable[Tensor]) -> str | None:
    """How token vectors become one vector; `rank` for a file that has only a classifier head."""
    number = header.integer(f"{architecture}.pooling_type", -1)
    if 0 <= number < len(_POOLINGS):
        return _POOLINGS[number]
    return "rank" if any(one.name == _CLASSIFIER for one in tensors) else None


def per_layer(header: Header, key: str, layers: int, default: int) -> tuple[int, ...]:
    """Expand a key that has either one number for all layers or one for each."""
    given = header.integers(key)
    if len(given) > 1:
        return given
    return (given[0] if given else default,) * layers


def sliding(header: Header, architecture: str, layers: int) -> tuple[bool, ...]:
    """Whether each layer sees a sliding window only."""
    own = f"{architecture}.attention.sliding_window"
    if not header.integer(own):
        return (False,) * layers
    pattern = header.integers(f"{own}_pattern")
    if len(pattern) == layers > 1:
        return tuple(map(bool, pattern))
    period = pattern[0] if pattern else _PERIODS.get(architecture, 1)
    if not period:  # all of them
        return (True,) * layers
    return tuple(layer % period < period - 1 for layer in range(layers))


def kv_heads(header: Header, architecture: str, layers: int, heads: int) -> tuple[int, ...]:
    """Key and value heads of each layer; 0 for one without a KV cache of the model's own.

    Source: llama.cpp, load_arch_hparams of qwen35 and qwen3next; a layer that only drafts has its
    cache in another context.
    """
    own = f"{architecture}."
    given = per_layer(header, f"{own}attention.head_count_kv", layers, heads)
    trunk = layers - draft_layers(header, architecture)
    marked = header.integers(f"{own}attention.recurrent_layers")
    interval = header.integer(f"{own}full_attention_interval", _INTERVALS.get(architecture, 1))
    if len(marked) != layers:
        marked = tuple((layer + 1) % max(1, interval) for layer in range(layers))
    return tuple(
        0 if marked[layer] or layer >= trunk else count for layer, count in enumerate(given)
    )


def is_recurrent(header: Header, architecture: str) -> bool:
    """Whether some layers keep a state instead of a KV cache: Mamba, RWKV, LFM2, delta nets."""
    own = tuple(f"{architecture}.{name}." for name in ("ssm", "wkv", "shortconv", "kda"))
    return any(key.startswith(own) for key in header.metadata)


def state_values(header: Header, architecture: str, kv_heads: tuple[int, ...]) -> int:
    """Values that all recurrent layers keep for one sequence.

    A Mamba layer keeps its state and the last inputs of its convolution, an LFM2 layer only these.
    Where the file marks layers that have a KV cache, those have no recurrent state.

    Source: llama-hparams.cpp, n_embd_r and n_embd_s.
    """
    own = f"{architecture}."
    trunk = kv_heads[: len(kv_heads) - draft_layers(header, architecture)]
    count = trunk.count(0) or len(trunk)
    if inputs := header.integer(f"{own}shortconv.l_cache"):
        return count * (inputs - 1) * header.integer(f"{own}embedding_length")
    inner, state, kernel, groups = (
        header.integer(f"{own}ssm.{name}")
        for name in ("inner_size", "state_size", "conv_kernel", "group_count")
    )
    if not inner:
        return 0
    return count * (max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state)


def drafts_for(header: Header, architecture: str, found: Sequence[Tensor]) -> int:
    """Width of the model that a file of draft heads belongs to; 0 for a model of its own.

    Source: llama.cpp, load_arch_hparams of eagle3; load_arch_tensors of qwen35, `mtp_only`.
    """
    width = header.integer(f"{architecture}.embedding_length")
    if architecture == "eagle3":
        return header.integer("eagle3.target_hidden_size", width)
    has_trunk = any(one.name == _FIRST_LAYER for one in found)
    return width if loaded_draft_layers(header, architecture, found) and not has_trunk else 0


def loaded_draft_layers(header: Header, architecture: str, found: Sequence[Tensor]) -> int:
    """Layers that draft and are there: converters may leave their weights out."""
    is_there = any(one.name.endswith(_DRAFT_LAYER) for one in found)
    return draft_layers(header, architecture) if is_there else 0


def draft_layers(header: Header, architecture: str) -> int:
    """Layers at the end that only draft (multi-token prediction, MTP)."""
    layers = header.integer(f"{architecture}.block_count")
    return min(layers, header.integer(f"{architecture}.nextn_predict_layers"))


def feed_forward(header: Header, architecture: str) -> int:
    """Values per token in the widest feed-forward layer."""
    own = f"{architecture}."
    of_experts = header.integer(f"{own}expert_feed_forward_length") * header.integer(
        f"{own}expert_used_count"
    )
    return max(header.integer(f"{own}feed_forward_length"), of_experts)
