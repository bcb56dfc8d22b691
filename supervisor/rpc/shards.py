"""Which layers each worker of a split model gets. Pure, but for the shares that are kept on disk.

Divides whole layers in proportion to weights, by largest remainders.

Source: Balinski and Young, Fair Representation, on Hamilton's method.

Which layers each device of a split model gets.

Source: llama-model.cpp, load_tensors: the output counts as one more layer, after the last; the
layers on devices are the last ones; number N of these L goes to the first device whose cumulated
share of the split is greater than N / L.

How many layers of a split model each worker gets, as `corral balance --apply` left it. One file for
each model, which also has what they were before. It is not used once the model has other workers or
another number of layers.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from supervisor.errors import AccessDenied
from supervisor.models.metadata import Gguf
from supervisor.plan import kv_cache
from supervisor.plan.context import compute_bytes, context_layout
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan
from supervisor.plan.resolve import SPLIT, RpcWorker
from supervisor.rpc.address import WorkerAddress
from supervisor.system import files
from supervisor.system.files import write_atomic
from supervisor.system.paths import file_name, make_private


@dataclass(frozen=True, slots=True)
class Share:
    """What one of them should have, as a fraction of layers, and what it may have."""

    quota: float
    least: int
    most: int

    @property
    def whole(self) -> int:
        return min(self.most, max(self.least, int(self.quota)))


def apportion(total: int, shares: Sequence[Share]) -> tuple[int, ...]:
    """Divide exactly `total`; of equal remainders, the first in order gets the layer.

    Raises:
        ValueError: The limits do not allow this total.
    """
    if not sum(share.least for share in shares) <= total <= sum(share.most for share in shares):
        raise ValueError(f"{total} cannot be divided within these limits")
    given = [share.whole for share in shares]
    while (missing := total - sum(given)) != 0:
        step = 1 if missing > 0 else -1
        at = max(_movable(given, shares, step), key=lambda i: step * (shares[i].quota - given[i]))
        given[at] += step
    return tuple(given)


def _movable(given: Sequence[int], shares: Sequence[Share], step: int) -> Iterator[int]:
    for at, (count, share) in enumerate(zip(given, shares, strict=True)):
        if share.least <= count + step <= share.most:
            yield at


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
    bounds = [total / sum(split) for total in accumulate(split)]
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


def layers_held(room_bytes: int, inputs: MemoryInputs, *, has_output: bool) -> int:
    """Return how many layers, with their KV cache, fit beside the compute buffers."""
    gguf = inputs.gguf
    layout = context_layout(gguf, inputs.chosen, inputs.engine)
    output = (gguf.output_bytes or gguf.embedding_bytes) if has_output else 0
    fixed = compute_bytes(gguf, layout) + output
    weights = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    caches = kv_cache.layer_bytes(gguf, layout.cache)
    each = weights // max(1, gguf.layers) + max(caches, default=0)
    return max(0, room_bytes - fixed) // max(1, each)


_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A worker, its layers, and what limits them.

    Attributes:
        more_layers: What it computes besides them, in layers.
        layers_max: How many its memory holds.
    """

    worker: WorkerAddress
    layers: int
    more_layers: float
    layers_max: int


def shard_plans(plan: Plan, addresses: Sequence[WorkerAddress]) -> tuple[ShardPlan, ...]:
    """Return the shards of a plan, in the order of its workers; none where that is not known."""
    split = _numbers(str(plan.memory_inputs.chosen.get(SPLIT, "")))
    owners = [name for worker in plan.workers for name in [worker.name] * len(worker.devices)]
    if not owners or len(split) != len(owners) or not sum(split):
        return ()
    layers = plan.gguf.layers
    found = [owners[at] for at in layer_owners(split, layers, _count_offloaded_layers(plan))]
    output = found[-1] if found else None
    by_name = {address.name: address for address in addresses}
    return tuple(
        _shard(plan, worker, by_name[worker.name], found, has_output=worker.name == output)
        for worker in plan.workers
    )


def _shard(
    plan: Plan,
    worker: RpcWorker,
    address: WorkerAddress,
    owners: Sequence[str],
    *,
    has_output: bool,
) -> ShardPlan:
    room = sum(device.total_mib for device in worker.devices) * _MIB
    return ShardPlan(
        address,
        owners.count(worker.name) - has_output,
        output_in_layers(plan.gguf) if has_output else 0.0,
        layers_held(room, plan.memory_inputs, has_output=has_output),
    )


def worker_split(workers: Sequence[RpcWorker], layers: Mapping[str, int]) -> str:
    """Return the `--tensor-split` for these layers; a worker's devices share by their memory."""
    counts = [count for worker in workers for count in _by_device(worker, layers[worker.name])]
    return ",".join(map(str, split_for(counts)))


def _by_device(worker: RpcWorker, layers: int) -> Iterator[int]:
    sizes = [max(1, device.total_mib) for device in worker.devices]
    quotas = (layers * size / sum(sizes) for size in sizes)
    yield from apportion(layers, [Share(quota, 0, layers) for quota in quotas])


def _count_offloaded_layers(plan: Plan) -> int:
    """The number of layers on workers; the output counts as one."""
    requested, most = str(plan.memory_inputs.chosen.get("gpu-layers")), plan.gguf.layers + 1
    return min(most, int(requested)) if requested.isdecimal() else most


def _numbers(split: str) -> list[float]:
    try:
        return [float(part) for part in split.split(",")]
    except ValueError:
        return []


class LayerShares:
    """The files in a directory, which is made when something is written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def layers(self, model: str, workers: Collection[str], layers: int) -> dict[str, int] | None:
        """Return the layers by worker of a model that has this many; None if not usable."""
        return self._usable("layers", model, workers, layers)

    def before(self, model: str, workers: Collection[str], layers: int) -> dict[str, int] | None:
        """Return likewise those before they were moved last."""
        return self._usable("before", model, workers, layers)

    def _usable(
        self, member: str, model: str, workers: Collection[str], layers: int
    ) -> dict[str, int] | None:
        found = _counts(files.get(self._root, file_name(model)), member)
        is_usable = found.keys() == set(workers) and sum(found.values()) == layers
        return found if is_usable else None

    def write(self, model: str, layers: Mapping[str, int], before: Mapping[str, int]) -> Path:
        """Replace a model's file; raises AccessDenied."""
        path = make_private(self._root) / f"{file_name(model)}.json"
        try:
            write_atomic(path, json.dumps({"layers": dict(layers), "before": dict(before)}))
        except OSError as error:
            raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
        return path


def _counts(found: Mapping[str, Any] | None, member: str) -> dict[str, int]:
    """Return layers by worker; empty where a file says something else."""
    layers = found.get(member) if found else None
    if not isinstance(layers, dict):
        return {}
    counts = {name: count for name, count in layers.items() if type(count) is int and count > 0}
    return counts if len(counts) == len(layers) else {}
