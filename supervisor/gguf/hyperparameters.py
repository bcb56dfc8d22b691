"""Upper bounds of the hyperparameters in a GGUF file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeGuard

from supervisor.gguf.walker import ARRAY_KEPT

# Each one bounds a loop or scales an amount of memory, so an implausible value is rejected here.
# The bounds are at least eight times the largest known models; the engine has bounds of its own,
# such as 512 layers (LLAMA_MAX_LAYERS).

_TOKENS_MAX: Final = 2**31 - 1
LAYERS_MAX: Final = 1024

# By the key behind the architecture's name.
LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "block_count": LAYERS_MAX,
        "context_length": _TOKENS_MAX,
        "embedding_length": 1 << 20,
        "vocab_size": 1 << 24,
        "feed_forward_length": 1 << 24,
        "expert_feed_forward_length": 1 << 24,
        "expert_count": 1 << 16,
        "expert_used_count": 1 << 12,
        "attention.head_count": 1 << 14,
        "attention.head_count_kv": 1 << 14,
        "attention.key_length": 1 << 16,
        "attention.value_length": 1 << 16,
        "attention.sliding_window": _TOKENS_MAX,
        "attention.sliding_window_pattern": LAYERS_MAX,
        "attention.recurrent_layers": LAYERS_MAX,
        "full_attention_interval": LAYERS_MAX,
        "nextn_predict_layers": LAYERS_MAX,
        "shortconv.l_cache": 1 << 10,
        "ssm.inner_size": 1 << 22,
        "ssm.state_size": 1 << 16,
        "ssm.conv_kernel": 1 << 10,
        "ssm.group_count": 1 << 12,
    }
)
_GENERAL: Final[Mapping[str, int]] = MappingProxyType(
    {"general.file_type": 1 << 16, "split.no": 99_999, "split.count": 99_999}
)
_BRIEF: Final = 40
# Booleans are accepted for these.
_BOOLEANS: Final = frozenset({"attention.sliding_window_pattern", "attention.recurrent_layers"})


def problem(metadata: Mapping[str, object], lengths: Mapping[str, int]) -> str | None:
    """The first problem with the hyperparameters of a file, or None."""
    return next(_problems(metadata, lengths), None)


def _problems(metadata: Mapping[str, object], lengths: Mapping[str, int]) -> Iterator[str]:
    architecture = metadata.get("general.architecture")
    own = f"{architecture if isinstance(architecture, str) else ''}."
    limits = {**_GENERAL, **{own + key: limit for key, limit in LIMITS.items()}}
    layers = metadata.get(f"{own}block_count")
    for key, limit in limits.items():
        count = lengths.get(key)
        if count is not None and count > 1 and count != layers:
            yield f"{key} has {count:,} values for a block_count of {layers} (at most {ARRAY_KEPT})"
        for value in _values(metadata.get(key)):
            if not _is_number(value, may_be_bool=key.removeprefix(own) in _BOOLEANS):
                yield f"{key} is {_brief(value)}, not an integer"
            elif not 0 <= value <= limit:
                yield f"{key} is {value}, not between 0 and {limit}"


def _values(found: object) -> tuple[object, ...]:
    if found is None:
        return ()
    return found if isinstance(found, tuple) else (found,)


def _is_number(value: object, *, may_be_bool: bool) -> TypeGuard[int]:
    return isinstance(value, int) and (may_be_bool or not isinstance(value, bool))


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"
