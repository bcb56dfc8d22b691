"""The shards of a plan: layers, the output, and memory, by worker."""

from __future__ import annotations

from pathlib import Path

from support.samples import engine, machine, model

from supervisor.builds.discover import Device
from supervisor.builds.help import FlagValue
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry, RpcWorker
from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.shards import shard_plans, worker_split
from supervisor.system.paths import shipped_directory

ADDRESSES = tuple(WorkerAddress(name, "127.0.0.1", port) for port, name in enumerate("ab", 1))


def worker(name: str, *sizes_mib: int) -> RpcWorker:
    devices = tuple(Device("RPC", "127.0.0.1:1", size) for size in sizes_mib)
    return RpcWorker(name, "127.0.0.1:1", devices)


def planned(*workers: RpcWorker, split: str | None = None, **flags: FlagValue) -> Plan:
    entry = ModelEntry(
        "chat",
        Path("/models/chat.gguf"),
        flags={name.replace("_", "-"): value for name, value in flags.items()},
        workers=workers,
        split=split,
    )
    profile = load("base", (shipped_directory("profiles"),))
    return make_plan(entry, profile, engine(), model(), machine(), instances=1)


def layers(plan: Plan) -> list[int]:
    return [shard.layers for shard in shard_plans(plan, ADDRESSES)]


def test_a_split_gives_each_worker_its_layers_and_the_last_one_the_output() -> None:
    """seed 000: layer_count"""
    a, b = shard_plans(planned(worker("a", 8000), worker("b", 8000)), ADDRESSES)
    assert (a.layers, b.layers) == (16, 14)
    assert (a.worker, b.worker) == ADDRESSES
    assert a.more_layers == 0 < b.more_layers


def test_moved_layers_become_the_split() -> None:
    """seed 000: suggested_assignments"""
    workers, total = (worker("a", 8000), worker("b", 8000)), model().layers
    split = worker_split(workers, {"a": total - 2, "b": 2})
    assert split == f"{total - 2},3"
    assert layers(planned(*workers, split=split)) == [total - 2, 2]


def test_a_split_of_the_user_wins_over_a_moved_split() -> None:
    """seed 000"""
    workers, total = (worker("a", 8000), worker("b", 8000)), model().layers
    plan = planned(*workers, split=f"{total - 2},3", tensor_split=f"3,{total - 2}")
    assert layers(plan) == [3, total - 3]


def test_the_devices_of_a_worker_share_its_layers_by_their_memory() -> None:
    workers, total = (worker("a", 3000, 1000), worker("b", 8000)), model().layers
    split = worker_split(workers, {"a": 8, "b": total - 8})
    assert split == f"6,2,{total - 7}"
    assert layers(planned(*workers, split=split)) == [8, total - 8]


def test_of_few_layers_on_workers_only_those_count() -> None:
    plan = planned(worker("a", 8000), worker("b", 8000), tensor_split="1,1", gpu_layers=5)
    assert layers(plan) == [3, 1]


def test_memory_limits_the_layers_of_a_worker() -> None:
    """seed 000: beyond it"""
    few, many = (
        shard_plans(planned(worker("a", size), worker("b", 8000)), ADDRESSES)[0].layers_max
        for size in (1000, 64_000)
    )
    assert 0 <= few < many
    assert many > model().layers


def test_what_is_not_known_is_not_measured() -> None:
    assert shard_plans(planned(), ADDRESSES) == ()
    args = planned(worker("a", 1), worker("b", 1), tensor_split="0,0")
    assert shard_plans(args, ADDRESSES) == ()
