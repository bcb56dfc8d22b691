"""Values that the daemon adapted, in plans: used for `auto` alone, and slots keep their context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.samples import GIB, engine, machine, model

from supervisor.builds.help import FlagValue
from supervisor.models.metadata import Gguf
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import Setting
from supervisor.system.paths import shipped_directory

MORE = {"parallel": Setting(16, "demand", "8 requests waited")}


def planned(
    adapted: Mapping[str, Setting],
    flags: Mapping[str, FlagValue] | None = None,
    *,
    profile: str = "base",
    gguf: Gguf | None = None,
    **here: Any,
) -> Plan:
    gguf = gguf or model()
    entry = ModelEntry("chat", gguf.path, profile=profile, flags=flags or {})
    under = load(profile, [shipped_directory("profiles")])
    return make_plan(entry, under, engine(), gguf, machine(**here), instances=1, adapted=adapted)


def test_each_of_more_slots_has_the_context_of_before() -> None:
    plan = planned(MORE)
    assert (plan.slots, plan.ctx_size) == (16, 16 * 8192)
    assert {key: entry.value for key, entry in plan.adapted.items()} == {"parallel": 16}
    (line,) = [line for line in plan.lines if line.flag == "--parallel"]
    assert (line.value, line.origin, line.reason) == ("16", "demand", "8 requests waited")


def test_memory_limits_the_slots_and_never_the_context() -> None:
    plan = planned(MORE, memory_bytes=5 * GIB)
    assert (plan.slots, plan.ctx_size) == (8, 8 * 8192)
    assert "memory holds 8" in plan.adapted["parallel"].reason
    assert planned(MORE, memory_bytes=2 * GIB).slots == planned({}, memory_bytes=2 * GIB).slots == 4


@pytest.mark.parametrize(
    "flags", [{"parallel": 2}, {"ctx-size": 8192}, {"kv-unified": True}], ids=str
)
def test_what_the_user_set_stays(flags: dict[str, FlagValue]) -> None:
    plan, plain = planned(MORE, flags), planned({}, flags)
    assert (plan.slots, plan.ctx_size, plan.adapted) == (plain.slots, plain.ctx_size, {})


def test_a_number_of_the_profile_stays() -> None:
    assert planned(MORE, profile="high-throughput").adapted == {}


def test_an_embedding_model_keeps_its_one_slot() -> None:
    plan = planned(MORE, {"embedding": True})
    assert (plan.slots, plan.adapted) == (1, {})


def test_other_values_follow_an_adapted_one() -> None:
    adapted = {"threads-batch": Setting(1, "machine", "other programs compute")}
    plain, plan = planned({}), planned(adapted)
    size = "batch-size"
    assert plan.memory_inputs.chosen["threads-batch"] == 1
    assert int(plan.memory_inputs.chosen[size]) < int(plain.memory_inputs.chosen[size])
    assert planned(adapted, {"threads-batch": 3}).memory_inputs.chosen["threads-batch"] == 3
