"""The layers of each worker of a split model. Pure, except the shares that are kept on disk.

Whole layers are divided in proportion to weights, by largest remainders. `plan.placement` says
which layers a split gives to each device.

`corral balance --apply` writes a file for each model, with the number of layers of each worker now
and before. It is not used once the model has other workers or another number of layers.

Source: Balinski and Young, Fair Representation, on Hamilton's method.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied
from supervisor.models.metadata import Gguf
from supervisor.plan import kv_cache
from supervisor.plan.context import compute_bytes, context_layout
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.placement import layer_owners
from supervisor.plan.plan import Plan
from supervisor.plan.resolve import SPLIT, RpcWorker
from supervisor.rpc.address import WorkerAddress
from supervisor.system import files
from supervisor.system.files import write_atomic
from supervisor.system.paths import file_name, make_private

# The ideal number of layers of a worker, a fraction; its least and its most.
Share = tuple[float, int, int]


def apportion(total: int, shares: Sequence[Share]) -> tuple[int, ...]:
    """Divide exactly `total`; equal remainders go in order. Raises ValueError: impossible."""
    if not sum(least for _, least, _ in shares) <= total <= sum(most for _, _, most in shares):
        raise ValueError(f"{total} cannot be divided within these limits")
    given = [min(most, max(least, int(quota))) for quota, least, most in shares]
    while (missing := total - sum(given)) != 0:
        step = 1 if missing > 0 else -1
        remainders = {
            at: step * (quota - given[at])
            for at, (quota, least, most) in enumerate(shares)
            if least <= given[at] + step <= most
        }
        given[max(remainders, key=remainders.__getitem__)] += step
    return tuple(given)


def split_for(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the `--tensor-split` with these layers; the last device gets the output."""
    return (*layers[:-1], layers[-1] + 1)


def output_in_layers(gguf: Gguf) -> float:
    """Return the work of the output, in layers: decoding reads each weight once per token."""
    output = gguf.output_bytes or gguf.embedding_bytes
    layers = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    return output * gguf.layers / layers if layers > 0 else 0.0


def layers_held(room_bytes: int, inputs: MemoryInputs, *, has_output: bool) -> int:
    """Return how many layers with their KV cache fit beside the compute buffers."""
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
    worker: WorkerAddress
    layers: int
    more_layers: float  # its work besides its layers, in layers
    layers_max: int  # the number of layers that its memory holds


def shard_plans(plan: Plan, addresses: Sequence[WorkerAddress]) -> tuple[ShardPlan, ...]:
    """Return the shards of a plan, in the order of its workers; none if they are unknown."""
    try:
        split = [float(part) for part in str(plan.memory_inputs.chosen.get(SPLIT)).split(",")]
    except ValueError:
        return ()
    owners = [name for worker in plan.workers for name in [worker.name] * len(worker.devices)]
    if not owners or len(split) != len(owners) or not sum(split):
        return ()
    layers = plan.gguf.layers
    requested, most = str(plan.memory_inputs.chosen.get("gpu-layers")), layers + 1
    offloaded = min(most, int(requested)) if requested.isdecimal() else most
    found = [owners[at] for at in layer_owners(split, layers, offloaded)]
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
    """Return the `--tensor-split` for these layers, divided over devices by their memory."""
    counts: list[int] = []
    for worker in workers:
        total = layers[worker.name]
        sizes = [max(1, device.total_mib) for device in worker.devices]
        shares = [(total * size / sum(sizes), 0, total) for size in sizes]
        counts += apportion(total, shares)
    return ",".join(map(str, split_for(counts)))


class LayerShares:
    """The files in a directory, which the first write makes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def layers(
        self, model: str, workers: Collection[str], layers: int, *, before: bool = False
    ) -> dict[str, int] | None:
        """Return a model's layers by worker, now or `before` the last move.

        None unless they are `layers` layers of `workers`.
        """
        member = "before" if before else "layers"
        found = (files.get(self._root, file_name(model)) or {}).get(member)
        if not isinstance(found, dict) or found.keys() != set(workers):
            return None
        if not all(type(count) is int and count > 0 for count in found.values()):
            return None
        return found if sum(found.values()) == layers else None

    def write(self, model: str, layers: Mapping[str, int], before: Mapping[str, int]) -> Path:
        """Replace a model's file; raises AccessDenied."""
        path = make_private(self._root) / f"{file_name(model)}.json"
        try:
            write_atomic(path, json.dumps({"layers": dict(layers), "before": dict(before)}))
        except OSError as error:
            raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
        return path
