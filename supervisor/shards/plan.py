"""The shards of a planned instance: which layers each worker gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.flags.plan import Plan
from supervisor.flags.workers import SPLIT, RpcWorker
from supervisor.shards.apportion import Share, apportion
from supervisor.shards.layers import layer_owners, output_in_layers, split_for
from supervisor.shards.memory import layers_held
from supervisor.workers.address import WorkerAddress

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
    owners = [name for one in plan.workers for name in [one.name] * len(one.devices)]
    if not owners or len(split) != len(owners) or not sum(split):
        return ()
    layers = plan.gguf.layers
    found = [owners[at] for at in layer_owners(split, layers, _offloaded(plan))]
    output = found[-1] if found else None
    by_name = {one.name: one for one in addresses}
    return tuple(
        _shard(plan, one, by_name[one.name], found, has_output=one.name == output)
        for one in plan.workers
    )


def _shard(
    plan: Plan,
    worker: RpcWorker,
    address: WorkerAddress,
    owners: Sequence[str],
    *,
    has_output: bool,
) -> ShardPlan:
    room = sum(one.total_mib for one in worker.devices) * _MIB
    return ShardPlan(
        address,
        owners.count(worker.name) - has_output,
        output_in_layers(plan.gguf) if has_output else 0.0,
        layers_held(room, plan.memory_inputs, has_output=has_output),
    )


def worker_split(workers: Sequence[RpcWorker], layers: Mapping[str, int]) -> str:
    """Return the `--tensor-split` for these layers; a worker's devices share by their memory."""
    counts = [count for one in workers for count in _by_device(one, layers[one.name])]
    return ",".join(map(str, split_for(counts)))


def _by_device(worker: RpcWorker, layers: int) -> Iterator[int]:
    sizes = [max(1, one.total_mib) for one in worker.devices]
    quotas = (layers * size / sum(sizes) for size in sizes)
    yield from apportion(layers, [Share(quota, 0, layers) for quota in quotas])


def _offloaded(plan: Plan) -> int:
    """The number of layers on workers; the output counts as one."""
    requested, most = str(plan.memory_inputs.chosen.get("gpu-layers")), plan.gguf.layers + 1
    return min(most, int(requested)) if requested.isdecimal() else most


def _numbers(split: str) -> list[float]:
    try:
        return [float(one) for one in split.split(",")]
    except ValueError:
        return []
