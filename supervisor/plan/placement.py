"""Where the weights of a model go: layers to devices, and tensors that stay in main memory. Pure.

The layers on devices are the last ones, and the output counts as one more after them. Layer number
N of the L on devices goes to the first device whose cumulated share of `--tensor-split` is greater
than N / L. The first override whose pattern is found in the name of a tensor decides for it;
`--cpu-moe` and `--n-cpu-moe` are overrides of experts. `--fit` moves experts to main memory before
it moves layers.

Source: llama.cpp, load_tensors in llama-model.cpp and create_tensor in llama-model-loader.cpp;
common.h, LLM_FFN_EXPS_REGEX; fit.cpp, common_params_fit_impl; llama-arch.cpp, LLM_TENSOR_INFOS.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Final

from supervisor.builds.help import FlagValue
from supervisor.models.metadata import Gguf

_EXPERTS: Final = r"ffn_(up|down|gate_up|gate)_(ch|)exps"
_CPU: Final = "CPU"
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
# Tensors that a graph reads by row, on the host.
_INPUTS: Final = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")

# A pattern, and the name of the memory for tensors with such names: a device, or else the host.
Override = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Placement:
    layers: int  # on devices; the output counts as a layer
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Bytes of weights on devices."""

    by_layer: tuple[int, ...]  # of all layers of the model
    output: int  # of the device of the last layer
    named: Mapping[str, int] = field(default_factory=dict)  # by overrides, to devices by name
    # The largest tensor of a layer in main memory: a device gets a copy of it for a large batch.
    # Those of the last layer's feed-forward part are not copied: they multiply the outputs alone,
    # which are less than 32. Source: ggml-vulkan.cpp, ggml_backend_vk_device_offload_op.
    largest_kept: int = 0
    # Of a layer whose `down` experts are in main memory: whether its `up` and `gate` experts, both
    # or one, are on a device; the largest count of all layers, 0 to 2.
    up_and_gate: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_layer) + self.output + sum(self.named.values())


def first_layer(gguf: Gguf, placement: Placement) -> int:
    """Return the first layer on devices, which is also the number of the others."""
    return gguf.layers if not placement.layers else max(0, gguf.layers + 1 - placement.layers)


def overrides(chosen: Mapping[str, FlagValue]) -> tuple[Override, ...]:
    """Return the overrides of a command line; those that no engine accepts are left out."""
    return tuple(_overrides(chosen))


def _overrides(chosen: Mapping[str, FlagValue]) -> Iterator[Override]:
    for word in filter(None, str(chosen.get("override-tensor", "")).split(",")):
        pattern, _, memory = word.rpartition("=")
        try:
            re.compile(pattern)
        except re.error:
            continue
        yield pattern, memory
    if chosen.get("cpu-moe") is True:
        yield _EXPERTS, _CPU
    count = str(chosen.get("n-cpu-moe", ""))
    if count.isdecimal() and int(count):
        yield _of_layers(range(int(count)), _EXPERTS), _CPU


def placed_weights(gguf: Gguf, placement: Placement, devices: tuple[str, ...]) -> PlacedWeights:
    return _placed(gguf.tensors, first_layer(gguf, placement), placement, gguf.layers, devices)


@lru_cache(maxsize=64)
def _placed(
    tensors: Sequence[tuple[str, int]],
    first: int,
    placement: Placement,
    layers: int,
    devices: tuple[str, ...],
) -> PlacedWeights:
    patterns = [(re.compile(pattern), memory) for pattern, memory in placement.overrides]
    by_layer, output, named, largest_kept = [0] * layers, 0, dict[str, int](), 0
    kept_experts = defaultdict[int, set[str]](set)
    for name, size_bytes in tensors:
        found = _LAYER.match(name)
        layer = min(int(found[1]), layers - 1) if found else None
        memory = next((memory for pattern, memory in patterns if pattern.search(name)), None)
        if memory in devices:
            named[memory] = named.get(memory, 0) + size_bytes
        elif layer is None:
            is_moved = placement.layers and memory is None and not name.startswith(_INPUTS)
            output += size_bytes if is_moved else 0
        elif memory is None and layer >= first:
            by_layer[layer] += size_bytes
        elif layer < layers - 1 or "ffn_" not in name:
            largest_kept = max(largest_kept, size_bytes)
            if experts := re.search(_EXPERTS, name):
                kept_experts[layer].add(experts[1])
    up_and_gate = (
        2 - len(kept & {"up", "gate"})
        for kept in kept_experts.values()
        if "down" in kept and "gate_up" not in kept
    )
    return PlacedWeights(tuple(by_layer), output, named, largest_kept, max(up_and_gate, default=0))


def layers_with_experts_kept(gguf: Gguf, placement: Placement) -> tuple[int, ...]:
    """Return the layers on devices some of whose experts stay in main memory."""
    names = [name for name, _ in gguf.tensors if re.search(_EXPERTS, name)]
    kept = {
        int(found[1])
        for name in names
        if any(re.search(pattern, name) for pattern, _ in placement.overrides)
        if (found := _LAYER.match(name))
    }
    return tuple(sorted(layer for layer in kept if layer >= first_layer(gguf, placement)))


def layer_owners(
    split: Sequence[float], layers: int, offloaded: int | None = None
) -> tuple[int, ...]:
    """Return the device of each layer on devices; the last item is that of the output.

    `split` are the shares of `--tensor-split`, not all 0. `offloaded` layers are on devices,
    including the output; by default all.
    """
    count = layers + 1 if offloaded is None else min(layers + 1, offloaded)
    bounds = [total / sum(split) for total in accumulate(split)]
    last = max(at for at, share in enumerate(split) if share)
    return tuple(min(last, bisect.bisect_right(bounds, at / count)) for at in range(count))


def fitted(gguf: Gguf, fits: Callable[[Placement], bool]) -> Placement:
    """Return the placement that `--fit` chooses; `fits` returns whether devices hold one."""
    most = gguf.layers + 1
    whole = Placement(most)
    if fits(whole):
        return whole
    if not gguf.experts_used:
        return Placement(_most(range(1, most + 1), lambda count: fits(Placement(count))))
    if not fits(_with_experts_kept(gguf, most, most - 1)):
        counts = range(1, most + 1)
        count = _most(counts, lambda count: fits(_with_experts_kept(gguf, count, count - 1)))
        return _with_experts_kept(gguf, count, max(0, count - 1))
    # The first layer always has its experts on a device then.
    full = _most(range(2, most), lambda full: fits(_with_experts_kept(gguf, most, most - full)))
    return _with_part_of_a_layer(gguf, most - (full or 1), fits)


def _with_part_of_a_layer(gguf: Gguf, kept: int, fits: Callable[[Placement], bool]) -> Placement:
    """Return the placement with a part of the first of `kept` layers on devices, if that fits."""

    def part(names: str) -> Placement:
        return _with_experts_kept(gguf, gguf.layers + 1, kept, names)

    if fits(up := part("ffn_(gate|gate_up|down)")):
        gate = part("ffn_down")
        return gate if fits(gate) else up
    attention = part("ffn_(gate|up|gate_up|down)")
    return attention if fits(attention) else part(_EXPERTS)


def _with_experts_kept(gguf: Gguf, count: int, kept: int, first: str = _EXPERTS) -> Placement:
    """Return `count` layers on devices, the last `kept` of them without their experts.

    The output is one of the `kept`. The tensors `first` are those kept of the first of them.
    """
    begin = gguf.layers + 1 - kept
    if begin >= gguf.layers:
        return Placement(count)
    rest = _of_layers(range(begin + 1, gguf.layers), _EXPERTS)
    of_first = ((_of_layers(range(begin, begin + 1), first), _CPU),)
    return Placement(count, of_first + (((rest, _CPU),) if begin + 1 < gguf.layers else ()))


def _of_layers(layers: range, names: str) -> str:
    return rf"blk\.({'|'.join(map(str, layers))})\.{names}"


def _most(counts: range, fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, 0 if none does; each smaller one fits too."""
    found = bisect.bisect_left(counts, True, key=lambda count: not fits(count))  # noqa: FBT003 (the key sought)
    return counts[found - 1] if found else 0
