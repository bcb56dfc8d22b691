"""Which layers each device of a split model gets. Pure.

Source: llama-model.cpp, load_tensors: the output counts as one more layer, after the last; the
layers on devices are the last ones; number N of these L goes to the first device whose cumulated
share of the split is greater than N / L.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

from supervisor.gguf.metadata import Gguf


def layer_owners(
    split: Sequence[float], layers: int, offloaded: int | None = None
) -> tuple[int, ...]:
    """Return the device of each layer on devices, and of the output as the last.

    Args:
        split: The shares of `--tensor-split`, not all 0.
        layers: Of the model.
        offloaded: How many are on devices, with the output; unset: all.
    """
    count = layers + 1 if offloaded is None else min(layers + 1, offloaded)
    bounds = [one / sum(split) for one in accumulate(split)]
    last = max(at for at, share in enumerate(split) if share)
    return tuple(min(last, bisect.bisect_right(bounds, at / count)) for at in range(count))


def layer_counts(split: Sequence[float], layers: int) -> tuple[int, ...]:
    """Return how many layers each share gets, without the output."""
    owners = layer_owners(split, layers)[:-1]
    return tuple(owners.count(at) for at in range(len(split)))


def split_for(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the `--tensor-split` with these layers; the output goes to the last."""
    return (*layers[:-1], layers[-1] + 1)


def output_in_layers(gguf: Gguf) -> float:
    """Return the work of the output, in layers: decoding reads each weight once per token."""
    output = gguf.output_bytes or gguf.embedding_bytes
    layers = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    return output * gguf.layers / layers if layers > 0 else 0.0
