"""Derives a model's capabilities and `/v1/models` metadata from its file, for clients. Pure.

Sources: for capabilities, Ollama, types/model/capability.go and server/images.go, which inspects
templates in the same way; for metadata, llama.cpp, build 10434: `get_models` of
tools/server/server-context.cpp, `llama_vocab_type` of include/llama.h, `llama_model_ftype_name` of
src/llama-model-loader.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from supervisor.models.metadata import Gguf
from supervisor.models.tensors import DESCRIPTIONS

_VECTORS: Final = ("embedding", "embeddings", "rerank", "reranking")


def makes_vectors(found: Gguf, flags: Mapping[str, object]) -> bool:
    """Return whether a model with these flags embeds or ranks texts."""
    pooling = flags.get("pooling", found.pooling)
    is_asked = any(flags.get(name) for name in _VECTORS) or pooling not in {None, "none"}
    return is_asked or not found.is_causal


def capabilities(
    found: Gguf, flags: Mapping[str, object], chat_template: str, *, reads_images: bool
) -> tuple[str, ...]:
    if makes_vectors(found, flags):
        return ("embedding",)
    able = {
        "completion": True,
        "tools": "tools" in chat_template,
        "thinking": "enable_thinking" in chat_template or "<think>" in chat_template,
        "vision": reads_images,
    }
    return tuple(name for name, is_able in able.items() if is_able)


# By `tokenizer.ggml.model`.
_VOCABULARIES: Final = MappingProxyType(
    {"no_vocab": 0, "none": 0, "llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}
)
_SIZES: Final = MappingProxyType({"S": "Small", "M": "Medium", "L": "Large"})


def model_meta(found: Gguf) -> Mapping[str, int | str]:
    """Return the members of `meta` that do not need a running instance."""
    file_type = DESCRIPTIONS.get(found.quantisation, found.quantisation)
    kind, _, size = found.quantisation.rpartition("_")
    if kind.endswith("_K") and size in _SIZES:
        file_type = f"{kind} - {_SIZES[size]}"
    meta: dict[str, int | str] = {
        "n_vocab": found.vocab_size,
        "n_ctx_train": found.ctx_train,
        "n_embd": found.embedding_length,
        "n_params": found.parameters,
        "size": found.tensor_bytes,
        "ftype": file_type,
    }
    if found.tokenizer in _VOCABULARIES:
        meta["vocab_type"] = _VOCABULARIES[found.tokenizer]
    return meta
