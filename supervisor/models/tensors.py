"""Derives sizes of tensors and properties of layers from a GGUF header. Pure.

The tables of types are in `tensors.toml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from proxy.common.toml_text import table_beside
from supervisor.models.gguf import Header, Tensor

# Name, elements per block, bytes per block.
GgmlType = tuple[str, int, int]

UNKNOWN: Final = ("unknown", 1, 0)

_TABLES: Final = table_beside(__file__)
GGML_TYPES: Final[Mapping[int, GgmlType]] = {
    int(number): (name, elements, size_bytes)
    for number, (name, elements, size_bytes) in _TABLES["ggml_types"].items()
}
_BYTES_BY_NAME: Final = {name: size_bytes for name, _, size_bytes in GGML_TYPES.values()}

FILE_TYPES: Final = {int(number): name for number, name in _TABLES["file_types"].items()}
DESCRIPTIONS: Final[Mapping[str, str]] = _TABLES["descriptions"]


def block_bytes(name: str) -> int:
    return _BYTES_BY_NAME[name]


EMBEDDING: Final = "token_embd.weight"
OUTPUT: Final = "output.weight"
# Repacked layouts interleave rows in groups: AMX tiles of 32, others of eight.
# Source: ggml-cpu/amx/amx.cpp and ggml-cpu/repack.cpp.
_ROW_GROUPS: Final = (32, 8, 1)

# If the file does not list the layers with a sliding window, llama.cpp derives them from the
# architecture: of every N layers, all but the last have one. Source: llama-model.cpp, load_hparams;
# llama-hparams.cpp, set_swa_pattern. An architecture that is missing here is assumed to have no
# such layers, so its KV cache is overestimated.
_PERIODS: Final[Mapping[str, int]] = MappingProxyType(
    {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "olmo2": 4}
)
# Of every N layers, the last has a KV cache and the others have a recurrent state, unless the file
# says otherwise. Source: llama.cpp, load_arch_hparams of these architectures.
_INTERVALS: Final[Mapping[str, int]] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
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
    _, elements, size_bytes = GGML_TYPES.get(tensor.kind, UNKNOWN)
    return tensor.elements // elements * size_bytes


def token_bytes(header: Header, architecture: str, tensors: Iterable[Tensor]) -> int:
    """Return the bytes of weights that one token reads, all of the embeddings included."""
    count = header.integer(f"{architecture}.expert_count")
    used = header.integer(f"{architecture}.expert_used_count")
    share = min(1.0, used / count) if count and used else 1.0
    sizes = ((tensor_bytes(tensor), "_exps." in tensor.name) for tensor in tensors)
    return round(sum(size * share if is_expert else size for size, is_expert in sizes))


def bytes_of(name: str, tensors: Iterable[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor.name == name)


def matrix_bytes(tensors: Sequence[Tensor], *, generates: bool) -> MatrixBytes:
    """Sum the matrices used in multiplications by type and by the group that divides their rows.

    A model that generates text without an output matrix loads the embedding twice.
    """
    is_tied = generates and all(tensor.name != OUTPUT for tensor in tensors)
    sizes: Counter[tuple[str, int]] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1 and (is_tied or tensor.name != EMBEDDING):
            kind, *_ = GGML_TYPES.get(tensor.kind, UNKNOWN)
            # AMX has no kernel for experts. Source: ggml-cpu/amx/amx.cpp, supports_op.
            groups = _ROW_GROUPS[1:] if len(tensor.shape) > 2 else _ROW_GROUPS
            group = next(rows for rows in groups if tensor.shape[1] % rows == 0)
            sizes[kind, group] += tensor_bytes(tensor)
    return tuple((kind, group, size) for (kind, group), size in sorted(sizes.items()))


def is_causal(header: Header, architecture: str) -> bool:
    declared = header.metadata.get(f"{architecture}.attention.causal", True)
    return declared is not False and architecture not in _ENCODERS


def pooling(header: Header, architecture: str, tensors: Iterable[Tensor]) -> str | None:
    """Return how token vectors become one vector; `rank` if the file has a classifier head."""
    number = header.integer(f"{architecture}.pooling_type", -1)
    if 0 <= number < len(_POOLINGS):
        return _POOLINGS[number]
    return "rank" if any(tensor.name == "cls.output.weight" for tensor in tensors) else None


def per_layer(header: Header, key: str, layers: int, default: int) -> tuple[int, ...]:
    """Expand a key that has a single number for all layers or a number for each."""
    given = header.integers(key)
    if len(given) > 1:
        return given
    return (given[0] if given else default,) * layers


def sliding_layers(header: Header, architecture: str, layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it sees only a sliding window."""
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
    """Return the key and value heads of each layer; 0 for a layer without a KV cache.

    Layers that only draft have their cache in another context. Source: llama.cpp,
    load_arch_hparams of qwen35 and qwen3next.
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
    """Return whether any layer has a state instead of a KV cache: Mamba, RWKV, LFM2, delta nets."""
    own = tuple(f"{architecture}.{name}." for name in ("ssm", "wkv", "shortconv", "kda"))
    return any(key.startswith(own) for key in header.metadata)


def state_values(header: Header, architecture: str, kv_heads: tuple[int, ...]) -> int:
    """Return the number of values that all recurrent layers keep for one sequence.

    A Mamba layer keeps its state and the last inputs of its convolution; an LFM2 layer, only the
    inputs. A layer that the file marks as having a KV cache has no state. Source:
    llama-hparams.cpp, n_embd_r and n_embd_s.
    """
    own = f"{architecture}."
    trunk = kv_heads[: len(kv_heads) - draft_layers(header, architecture)]
    count = trunk.count(0) or len(trunk)
    if inputs := header.integer(f"{own}shortconv.l_cache"):
        return count * (inputs - 1) * header.integer(f"{own}embedding_length")
    names = ("inner_size", "state_size", "conv_kernel", "group_count")
    inner, state, kernel, groups = (header.integer(f"{own}ssm.{name}") for name in names)
    if not inner:
        return 0
    return count * (max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state)


# Heads that draft a block of tokens at once; with a Markov head they are DSpark.
DFLASH: Final = "dflash"


def has_markov_head(found: Sequence[Tensor]) -> bool:
    return any(tensor.name == "markov_w1.weight" for tensor in found)


def drafts_for(header: Header, architecture: str, found: Sequence[Tensor]) -> int:
    """Return the width of the model that a file of draft heads belongs to; 0 for a whole model.

    Source: llama.cpp, load_arch_hparams of eagle3 and dflash; load_arch_tensors of qwen35,
    `mtp_only`.
    """
    width = header.integer(f"{architecture}.embedding_length")
    if architecture == "eagle3":
        return header.integer("eagle3.target_hidden_size", width)
    if architecture == DFLASH:
        return width
    has_trunk = any(tensor.name == "blk.0.attn_norm.weight" for tensor in found)
    return width if loaded_draft_layers(header, architecture, found) and not has_trunk else 0


def loaded_draft_layers(header: Header, architecture: str, found: Sequence[Tensor]) -> int:
    """Return the number of draft layers; 0 if the file lacks their weights."""
    is_there = any(tensor.name.endswith(".nextn.eh_proj.weight") for tensor in found)
    return draft_layers(header, architecture) if is_there else 0


def draft_layers(header: Header, architecture: str) -> int:
    """Return the number of layers at the end that only draft (multi-token prediction, MTP)."""
    layers = header.integer(f"{architecture}.block_count")
    return min(layers, header.integer(f"{architecture}.nextn_predict_layers"))


def feed_forward(header: Header, architecture: str) -> int:
    own = f"{architecture}."
    of_experts = header.integer(f"{own}expert_feed_forward_length") * header.integer(
        f"{own}expert_used_count"
    )
    return max(header.integer(f"{own}feed_forward_length"), of_experts)
