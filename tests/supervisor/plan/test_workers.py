"""The options and the memory of a model whose layers workers compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import GIB, GPU, engine, machine, model

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import Flags, FlagValue
from supervisor.errors import SettingsInvalid
from supervisor.plan.estimate import estimate
from supervisor.plan.fit import capacity, misfit_reason
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry, RpcWorker
from supervisor.system.paths import shipped_directory

LARGE = model(tensor_bytes=12 * GIB, embedding_bytes=GIB, matrix_bytes=())
LAYER_BYTES = 11 * GIB / 30


def worker(name: str, *mib: int, here: bool = False) -> RpcWorker:
    address = f"10.0.0.{len(name)}:50052"
    devices = (Device("RPC", address, entry, is_main_memory=here) for entry in mib)
    return RpcWorker(name, address, tuple(devices))


def planned(
    *workers: RpcWorker, flags: Mapping[str, FlagValue] | None = None, on: Engine | None = None
) -> Plan:
    entry = ModelEntry("chat", Path("/models/chat.gguf"), flags=flags or {}, workers=workers)
    profile, of = load("base", [shipped_directory("profiles")]), LARGE
    return make_plan(entry, profile, on or engine(), of, machine(), instances=1)


def options(plan: Plan) -> dict[str, str | None]:
    return {line.flag: line.value for line in plan.lines}


def test_seed_000_all_layers_go_to_the_workers_in_their_order() -> None:
    plan = planned(worker("a", 8192), worker("bb", 8192))
    found = options(plan)
    assert found["--rpc"] == "10.0.0.1:50052,10.0.0.2:50052"
    assert found["--tensor-split"] == "1,1"
    assert found["--gpu-layers"] == "all"
    assert found["--fit"] == "off"
    (line,) = [line for line in plan.lines if line.flag == "--rpc"]
    assert line.origin == "workers a, bb"


def test_workers_of_unequal_memory_get_layers_in_proportion() -> None:
    found = options(planned(worker("a", 8192), worker("bb", 4096, 4096)))
    assert found["--tensor-split"] == "8192,4096,4096"


def test_the_split_of_a_model_is_its_own_as_long_as_its_devices_are_the_same() -> None:
    flags: dict[str, FlagValue] = {"tensor-split": "1,3"}
    both = planned(worker("a", 8192), worker("bb", 8192), flags=flags)
    assert options(both)["--tensor-split"] == "1,3"
    alone = planned(worker("a", 8192), flags=flags)
    assert options(alone)["--tensor-split"] == "1"


def test_a_device_of_this_machine_gets_no_layers_unless_it_is_named() -> None:
    flags = [*options(planned(worker("a", 8192), on=engine("b10434", GPU))).items()]
    names = [name for name, _ in flags]
    assert names.index("--rpc") < names.index("--device")
    assert dict(flags)["--device"] == "RPC0"


def test_the_option_is_rendered_for_relays_too() -> None:
    argv = planned(worker("a", 8192)).argv(host="x.sock", port=None, rpc="127.0.0.1:7")
    assert argv[argv.index("--rpc") + 1] == "127.0.0.1:7"


def test_an_engine_without_rpc_is_refused() -> None:
    old = engine()
    lacking = replace(old, flags=Flags(tuple(o for o in old.flags.entries if o.key != "rpc")))
    with pytest.raises(SettingsInvalid, match="built without RPC"):
        planned(worker("a", 8192), on=lacking)


def test_rpc_is_not_set_twice() -> None:
    with pytest.raises(SettingsInvalid, match="rpc is set beside workers"):
        planned(worker("a", 8192), flags={"rpc": "10.0.0.9:1"})


def test_shards_count_on_their_workers_and_not_here() -> None:
    alone, split = planned(), planned(worker("a", 16_384), worker("bb", 16_384))
    here, there = alone.estimate, split.estimate
    assert not here.workers
    assert here.host.weights == LARGE.tensor_bytes
    assert there.host.weights < 2 * GIB
    a, b = there.workers["a"], there.workers["bb"]
    # The engine's own split of 30 layers and the output; the embeddings serve as output.
    assert a.taken.weights == pytest.approx(16 * LAYER_BYTES, abs=30)
    assert b.taken.weights == pytest.approx(14 * LAYER_BYTES + GIB, abs=30)
    assert not there.devices
    assert there.local_workers_bytes == 0


def test_the_memory_follows_the_split() -> None:
    flags: dict[str, FlagValue] = {"tensor-split": "1,3"}
    found = planned(worker("a", 16_384), worker("bb", 16_384), flags=flags).estimate.workers
    assert found["a"].taken.weights == pytest.approx(8 * LAYER_BYTES, abs=30)
    assert found["bb"].taken.weights == pytest.approx(22 * LAYER_BYTES + GIB, abs=30)


def test_workers_of_this_machine_take_its_main_memory() -> None:
    elsewhere = planned(worker("a", 32_768)).estimate
    local = planned(worker("a", 32_768, here=True)).estimate
    assert local.local_workers_bytes == local.workers["a"].taken.at_start > 11 * GIB
    assert local.own_at_start_bytes > elsewhere.own_at_start_bytes + 11 * GIB


def test_a_worker_without_enough_memory_is_named() -> None:
    has = capacity(machine(), ())
    fits = estimate(planned(worker("a", 16_384)).memory_inputs)
    assert misfit_reason(fits, has) is None
    small = estimate(planned(worker("a", 4096)).memory_inputs)
    reason = misfit_reason(small, has)
    assert reason
    assert "of worker a, which has 4.0 GiB" in reason


def test_local_workers_that_exceed_this_machine_are_a_misfit() -> None:
    local = estimate(planned(worker("a", 32_768, here=True)).memory_inputs)
    reason = misfit_reason(local, capacity(machine(memory_bytes=8 * GIB), ()))
    assert reason
    assert "of it in workers, but models may use" in reason
