from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import FlagValue
from supervisor.diagnose.doctor import MemoryNeed, check_memory, check_plan, memory_need
from supervisor.diagnose.host_checks import check_engine
from supervisor.models import metadata
from supervisor.plan import profile
from supervisor.plan.plan import Plan, PlanLine, make_plan
from supervisor.plan.resolve import ModelEntry
from supervisor.system import machine
from supervisor.system.machine import Machine

ROOT = Path(__file__).parent.parent.parent.parent
GIB = 1 << 30
HERE = Machine(2, 2, 8 * GIB, 4 * GIB, None, may_renice=True, cpu_flags=frozenset())


@pytest.fixture(scope="module")
def plan(tiny_model: Path, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    facts = metadata.read(tiny_model, cache_dir=tmp_path_factory.mktemp("cache"))
    base = profile.load("base", (ROOT / "profiles",))
    flags: dict[str, FlagValue] = {"ctx-size": 1024, "parallel": 2}
    flags |= {"cache-type-k": "f16", "cache-type-v": "f16"}
    entry = ModelEntry(name="m", path=tiny_model, profile="base", replicas=1, flags=flags)
    return make_plan(entry, base, engine, facts, machine.read(), instances=1)


def test_an_engine_that_runs_is_fine(engine: Engine) -> None:
    found = list(check_engine(engine))
    assert {entry.level for entry in found} == {"ok"}
    assert "10434" in found[0].text


def test_an_engine_that_this_cpu_cannot_run_fails_with_a_fix(engine: Engine) -> None:
    doomed = replace(engine, warning="this CPU lacks x; pip install y", note=None)
    (finding,) = [entry for entry in check_engine(doomed) if entry.name == "cpu"]
    assert (finding.level, finding.text) == ("fail", "this CPU lacks x")
    assert finding.fix == "pip install y"


def test_devices_are_named(engine: Engine) -> None:
    with_gpu = replace(engine, devices=(Device("Vulkan0", "Some GPU", 8192),))
    assert "Vulkan0: Some GPU, 8192 MiB" in [entry.text for entry in check_engine(with_gpu)]


def test_a_model_that_can_be_planned_is_fine(plan: Plan) -> None:
    finding = next(iter(check_plan(plan)))
    assert finding.level == "ok"
    assert f"{plan.slots} slots" in finding.text


def test_a_warning_of_a_plan_is_reported_once(plan: Plan) -> None:
    poor = replace(plan, warnings=("too long; lower it", "of the engine"))
    poor = replace(poor, engine=replace(plan.engine, warning="of the engine"))
    found = [entry for entry in check_plan(poor) if entry.level == "warn"]
    assert [(entry.text, entry.fix) for entry in found] == [("too long", "lower it")]


def test_an_omitted_flag_is_reported(plan: Plan) -> None:
    poor = replace(plan, omitted=(PlanLine("prio", "2", "profile base", "not permitted"),))
    assert "runs without prio 2 (profile base): not permitted" in [
        entry.text for entry in check_plan(poor)
    ]


def test_a_model_needs_its_weights_once_and_a_cache_for_each_process(plan: Plan) -> None:
    one, two = memory_need(plan, 1), memory_need(plan, 2)
    # 1024 tokens, 2 layers, 2 heads of 32 values, f16, keys and values.
    assert one.cache_bytes == 2 * 512 * 2 * 2 * 32 * 2 * 2
    assert two.cache_bytes == 2 * one.cache_bytes
    assert one.weights_bytes == two.weights_bytes == plan.gguf.tensor_bytes


def test_a_model_on_a_device_locks_no_main_memory(plan: Plan) -> None:
    requested = replace(
        plan, omitted=(PlanLine("load-mode", "mmap+mlock", "profile base", "limit"),)
    )
    assert memory_need(requested, 1).locked_bytes == plan.gguf.tensor_bytes
    on_device = replace(plan.engine, devices=(Device("Vulkan0", "Some GPU", 8192),))
    assert memory_need(replace(requested, engine=on_device), 1).locked_bytes == 0


@pytest.mark.parametrize(
    ("wanted", "device", "level"),
    [
        (GIB, 0, "ok"),
        (6 * GIB, 0, "warn"),
        (9 * GIB, 0, "fail"),
        (9 * GIB, 16 * GIB, "ok"),
        (17 * GIB, 16 * GIB, "warn"),
    ],
)
def test_memory_must_suffice_for_all_models(wanted: int, device: int, level: str) -> None:
    finding = check_memory([MemoryNeed("m", wanted // 2, wanted // 2)], HERE, device)
    assert finding.level == level
    assert "m " in finding.text
    assert (finding.fix is None) is (level == "ok")


def on_request(name: str, gib: int) -> MemoryNeed:
    return MemoryNeed(name, gib * GIB, 0, is_preloaded=False)


def test_models_that_load_on_request_take_turns() -> None:
    finding = check_memory(
        [MemoryNeed("m", 3 * GIB, 0), on_request("a", 6), on_request("b", 7)], HERE, 0
    )
    assert finding.level == "ok"
    assert "2 more load on request" in finding.text
    assert check_memory([on_request("a", 6), on_request("b", 7)], HERE, 0).level == "ok"
    never = check_memory([MemoryNeed("m", GIB, 0), on_request("huge", 9)], HERE, 0)
    assert (never.level, "huge" in never.text) == ("fail", True)


def test_without_models_to_load_memory_is_fine() -> None:
    finding = check_memory([], HERE, 0)
    assert (finding.level, "0 B" in finding.text) == ("ok", False)
