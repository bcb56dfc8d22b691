"""What the layers of a model keep between tokens, by its header. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from supervisor.gguf.header import Header, Tensor

# Where the file does not say which layers have a window, llama.cpp knows by the architecture: of
# every so many layers, all but the last have one. Source: llama-model.cpp, load_hparams;
# llama-hparams.cpp, set_swa_pattern. What is not listed is taken to have none, and so for more
# than it keeps.
_PERIODS: Final[Mapping[str, int]] = MappingProxyType(
    {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "olmo2": 4}
)


# Models that see a text as a whole, and generate none. Source: llama-arch.cpp and the builders of
# llama-model.cpp that make no KV cache.
_ENCODERS: Final = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"}
    | {"jina-bert-v3", "eurobert", "gemma-embedding", "t5encoder", "llama-embed"}
)
# Source: llama.h, llama_pooling_type.
_POOLINGS: Final = ("none", "mean", "cls", "last", "rank")
_CLASSIFIER: Final = "cls.output.weight"


def is_causal(header: Header, architecture: str) -> bool:
    """Return whether a token sees earlier ones only."""
    told = header.metadata.get(f"{architecture}.attention.causal", True)
    return told is not False and architecture not in _ENCODERS


def pooling(header: Header, architecture: str, tensors: Iterable[Tensor]) -> str | None:
    """Return how vectors are made of tokens; None where the file says nothing of it.

    A file without a word of it that has a head for classes ranks texts.
    """
    number = header.integer(f"{architecture}.pooling_type", -1)
    if 0 <= number < len(_POOLINGS):
        return _POOLINGS[number]
    return "rank" if any(one.name == _CLASSIFIER for one in tensors) else None


def per_layer(header: Header, key: str, layers: int, otherwise: int) -> tuple[int, ...]:
    """Return a number for each layer, of a key that has one for all or one for each."""
    given = header.integers(key)
    if len(given) > 1:
        return given
    return (given[0] if given else otherwise,) * layers


def sliding(header: Header, architecture: str, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it sees a sliding window only."""
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


def state_values(header: Header, architecture: str, kv_heads: tuple[int, ...]) -> int:
    """Return the values that recurrent layers keep for one sequence.

    A layer of the Mamba kind keeps the last inputs of its convolution and its state. Layers that
    keep keys and values have none, where the file tells the two apart.

    Source: llama-hparams.cpp, n_embd_r and n_embd_s.
    """
    inner, state, kernel, groups = (
        header.integer(f"{architecture}.ssm.{name}")
        for name in ("inner_size", "state_size", "conv_kernel", "group_count")
    )
    if not inner:
        return 0
    count = kv_heads.count(0) or len(kv_heads)
    return count * (max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state)


def feed_forward(header: Header, architecture: str) -> int:
    """Return the values that a token has in the widest feed-forward layer."""
    own = f"{architecture}."
    of_experts = header.integer(f"{own}expert_feed_forward_length") * header.integer(
        f"{own}expert_used_count"
    )
    return max(header.integer(f"{own}feed_forward_length"), of_experts)
