"""Plans: derived values, omissions, precedence; and laws that hold for every build."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.samples import GIB, GPU, engine, flags, machine, model

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import FlagValue, newest_flags, recorded_builds
from supervisor.errors import SettingsInvalid
from supervisor.models.metadata import Gguf
from supervisor.plan.draft import Draft
from supervisor.plan.plan import Plan, PlanLine, check, make_plan, unix_sockets
from supervisor.plan.profile import load, names
from supervisor.plan.resolve import ModelEntry, RpcWorker
from supervisor.system.machine import Machine
from supervisor.system.paths import shipped_directory

SHIPPED = shipped_directory("profiles")
DRAFT = model(path=Path("/models/draft.gguf"))


def planned(
    profile: str = "base",
    set_flags: Mapping[str, FlagValue] | None = None,
    *,
    on: Engine | None = None,
    of: Gguf | None = None,
    at: Machine | None = None,
    instances: int = 1,
    draft: Gguf | None = None,
    draft_reason: str = "",
    dirs: Sequence[Path] = (SHIPPED,),
    **entry: Any,
) -> Plan:
    return make_plan(
        ModelEntry(
            "chat",
            Path("/models/chat.gguf"),
            profile=profile,
            flags=set_flags or {},
            draft=draft.path if draft else None,
            **entry,
        ),
        load(profile, dirs),
        on or engine(),
        of or model(),
        at or machine(),
        instances=instances,
        draft=Draft(draft, draft_reason),
    )


def line(plan: Plan, flag: str) -> PlanLine:
    return next(line for line in plan.lines if line.flag == flag)


def value(plan: Plan, flag: str) -> str | None:
    return line(plan, flag).value


def omitted(plan: Plan) -> dict[str, str]:
    return {line.flag: line.reason for line in plan.omitted}


# Laws


@pytest.mark.parametrize("build", recorded_builds())
def test_every_planned_flag_exists_in_the_build(build: str) -> None:
    known = flags(build)
    devices: tuple[tuple[Any, ...], ...] = ((), (GPU,))
    for profile, draft, gpus in itertools.product(names([SHIPPED]), (None, DRAFT), devices):
        plan = planned(profile, on=engine(build, *gpus), draft=draft)
        for line in plan.lines:
            flag = known.find(line.flag)
            assert flag, (profile, line.flag)
            assert line.flag in flag.names
            assert flag.is_usable
            assert (line.value is None) if flag.kind == "switch" else True
        spelled = [line.flag for line in plan.lines]
        assert len(spelled) == len(set(spelled)), profile
        assert all(line.origin for line in plan.lines), profile
        assert all(line.reason for line in plan.omitted), profile


@pytest.mark.parametrize("build", recorded_builds())
def test_every_profile_passes_its_check_on_every_build(build: str) -> None:
    for name in names([SHIPPED]):
        lines, _ = check(load(name, [SHIPPED]), flags(build))
        assert lines


# Precedence


def test_a_model_overrides_its_profile_and_the_profile_our_defaults() -> None:
    plan = planned("low-latency", {"np": 3, "sse-ping-interval": 9})
    assert line(plan, "--parallel") == PlanLine("--parallel", "3", "model chat", "")
    assert line(plan, "--prio").origin == "profile low-latency"
    assert line(plan, "--flash-attn").origin == "profile base"
    assert line(plan, "--sse-ping-interval").value == "9"


def test_the_command_line_starts_with_the_engine_and_its_address() -> None:
    """Seed 002: the command line: model, host and port."""
    plan = planned(args=("--verbose",))
    assert plan.argv(host="/run/chat.sock", port=None)[:3] == (
        "/opt/llama-server",
        "--host",
        "/run/chat.sock",
    )
    words = plan.argv(host="127.0.0.1", port=0)
    assert words[:7] == (
        *("/opt/llama-server", "--host", "127.0.0.1", "--port", "0"),
        *("--model", "/models/chat.gguf"),
    )
    assert words[-1] == "--verbose"


def test_every_engine_gets_its_own_context_batches_threads_and_slots() -> None:
    """Seed 002: ctx-size, batch-size, ubatch-size, threads, parallel; cont-batching."""
    plan = planned()
    sizes = ("--ctx-size", "--batch-size", "--ubatch-size", "--threads", "--parallel")
    assert all(int(value(plan, flag) or 0) > 0 for flag in sizes)
    assert value(plan, "--cont-batching") is None


def test_every_engine_gets_our_defaults() -> None:
    words = " ".join(planned().argv(host="127.0.0.1", port=0))
    for wanted in ("--alias chat", "--metrics", "--no-ui", "--cors-origins localhost", "--offline"):
        assert wanted in words


def test_an_engine_has_its_web_ui_where_browsers_get_it() -> None:
    words = planned(serves_ui=True).argv(host="127.0.0.1", port=0)
    assert "--no-ui" not in words


def test_unsupported_defaults_are_omitted_silently() -> None:
    plan = planned(on=engine("b6324"))
    assert "--cors-origins" not in omitted(plan)
    assert "--no-webui" in [line.flag for line in plan.lines]


# Derived values


@pytest.mark.parametrize(
    ("instances", "threads", "reading"), [(1, "8", "8"), (3, "2", "2"), (20, "1", "1")]
)
def test_physical_cores_are_divided(instances: int, threads: str, reading: str) -> None:
    plan = planned(instances=instances)
    assert value(plan, "--threads") == threads
    assert value(plan, "--threads-batch") == reading


def test_efficiency_cores_do_not_decode_beside_faster_ones() -> None:
    plan = planned(at=machine(physical_cores=12, efficiency_cores=8))
    assert value(plan, "--threads") == "4"
    assert line(plan, "--threads").reason == "4 performance cores for 1 instance"


def test_every_slot_gets_the_training_context() -> None:
    plan = planned(of=model(ctx_train=2048))
    assert (plan.slots, plan.ctx_size, value(plan, "--ctx-size")) == (4, 8192, "8192")
    assert line(plan, "--ctx-size").origin == "gguf"


def test_the_context_shrinks_to_fit_into_memory() -> None:
    plan = planned(of=model(kv_heads=(32,) * 80, key_length=128, value_length=128))
    # 0.66 MiB per token in q8_0: half of 24 GiB holds 4 x 4096 tokens, but not 4 x 8192.
    assert plan.ctx_size == 4 * 4096
    assert line(plan, "--ctx-size").origin == "machine"


def test_a_profiles_context_is_limited_to_the_training_context_a_models_is_not() -> None:
    short = model(ctx_train=1024)
    assert planned("low-memory", of=short).ctx_size == 1024
    asked = planned("low-memory", {"ctx-size": 4096}, of=short)
    assert asked.ctx_size == 4096
    assert "exceed the model's training context of 1024" in asked.warnings[0]


def test_many_slots_get_a_smaller_context_each() -> None:
    plan = planned("high-throughput")
    assert (plan.slots, plan.ctx_size) == (16, 16 * 4096)


def test_a_profiles_context_is_limited_per_slot(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(
        'extends = "base"\n[flags]\nparallel = 3\nctx-size = 65536\n'
    )
    plan = planned("long", dirs=(tmp_path, SHIPPED))
    assert plan.ctx_size == 3 * 8192
    assert "profile long has 65536" in line(plan, "--ctx-size").reason


def test_unified_slots_share_one_context() -> None:
    assert planned(set_flags={"kv-unified": True}).ctx_size == 8192


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "f16"),
        ({"on": engine("b10434", GPU)}, "q8_0"),
        ({"at": machine(memory_bytes=GIB)}, "q8_0"),
        ({"on": engine("b10434", GPU), "of": model(key_length=80)}, "f16"),
        ({"profile": "low-memory"}, "q8_0"),
    ],
)
def test_the_cache_is_quantised_where_it_pays(changes: dict[str, Any], expected: str) -> None:
    """Seed 002: cache-type-k, cache-type-v q8_0."""
    plan = planned(**changes)
    assert value(plan, "--cache-type-k") == value(plan, "--cache-type-v") == expected


def test_a_quantised_v_cache_without_flash_attention_is_left_out() -> None:
    plan = planned("low-memory", {"flash-attn": "off"})
    assert value(plan, "--cache-type-k") == "q8_0"
    assert "flash attention" in omitted(plan)["--cache-type-v"]


def test_heads_that_cannot_be_quantised_are_not() -> None:
    assert (
        "multiples of 32"
        in omitted(planned("low-memory", of=model(key_length=80)))["--cache-type-k"]
    )


def test_the_prompt_cache_gets_a_limited_share_of_memory() -> None:
    assert value(planned(at=machine(memory_bytes=512 * GIB)), "--cache-ram") == "8192"
    small = planned(at=machine(memory_bytes=2 * GIB), instances=2)
    assert 0 < int(value(small, "--cache-ram") or 0) < 200


@pytest.mark.parametrize(
    ("parameters", "batch"), [(135_000_000, "1024"), (8_000_000_000, "32"), (1_000_000, "2048")]
)
def test_a_batch_takes_half_a_second_to_a_second(parameters: int, batch: str) -> None:
    plan = planned(of=model(parameters=parameters))
    assert value(plan, "--batch-size") == batch
    assert int(value(plan, "--ubatch-size") or 0) <= int(batch)


def test_a_device_takes_large_batches_and_layers() -> None:
    """Seed 002: gpu-layers."""
    plan = planned(on=engine("b10434", GPU))
    assert value(plan, "--batch-size") == "2048"
    assert (value(plan, "--gpu-layers"), value(plan, "--fit")) == ("auto", "on")


def test_without_a_device_there_is_nothing_to_offload_or_fit() -> None:
    plan = planned()
    assert omitted(plan)["--gpu-layers"] == "the engine lists no device"
    assert value(plan, "--fit") == "off"


# Permissions


def test_memory_is_locked_only_if_permitted_and_sensible() -> None:
    """Seed 002: mlock."""
    assert value(planned(), "--load-mode") == "mmap+mlock"
    barred = planned(at=machine(memlock_bytes=8 * 1024**2))
    assert "cannot be locked: the limit is 8 MiB" in omitted(barred)["--load-mode"]
    assert "starve" in omitted(planned(of=model(tensor_bytes=20 * GIB)))["--load-mode"]
    assert "the device" in omitted(planned(on=engine("b10434", GPU)))["--load-mode"]


def test_weights_of_which_the_engine_uses_a_copy_are_not_locked() -> None:
    of = model()
    matrices = (("Q4_0", 576, of.tensor_bytes * 2 // 3), ("Q6_K", 576, of.tensor_bytes // 3))
    repacked, here = replace(of, matrix_bytes=matrices), machine(cpu_flags=frozenset({"avx2"}))
    assert value(planned(of=repacked, at=here), "--load-mode") == "mmap"
    other = machine(cpu_flags=frozenset())
    assert value(planned(of=repacked, at=other), "--load-mode") == "mmap+mlock"
    kept = planned(set_flags={"repack": False}, of=repacked, at=here)
    assert value(kept, "--load-mode") == "mmap+mlock"
    on_device = planned(of=repacked, at=here, on=engine("b10434", GPU))
    assert "the device" in omitted(on_device)["--load-mode"]
    address = "10.0.0.1:50052"
    remote = RpcWorker("a", address, (Device("RPC", address, 8192),))
    by_worker = planned(of=repacked, at=here, workers=(remote,))
    assert value(by_worker, "--load-mode") == "mmap+mlock"  # no CPU here repacks them
    few = replace(of, matrix_bytes=(("Q4_0", 576, of.tensor_bytes // 3),))
    assert value(planned(of=few, at=here), "--load-mode") == "mmap+mlock"


def test_threads_are_distributed_over_numa_nodes_if_there_are_several() -> None:
    assert value(planned(at=machine(numa_nodes=2)), "--numa") == "distribute"
    assert "one NUMA node" in omitted(planned())["--numa"]
    assert value(planned(set_flags={"numa": "numactl"}), "--numa") == "numactl"


def test_priority_is_raised_only_if_permitted() -> None:
    """Seed 002: prio 2."""
    assert value(planned("low-latency"), "--prio") == "2"
    barred = planned("low-latency", at=machine(may_renice=False))
    assert "not permitted" in omitted(barred)["--prio"]
    assert value(planned(set_flags={"prio": 0}, at=machine(may_renice=False)), "--prio") == "0"


@pytest.mark.parametrize(
    "wrong", [{"parallel": 0}, {"parallel": "many"}, {"ctx-size": -5}, {"batch-size": "big"}]
)
def test_invalid_numbers_are_rejected(wrong: dict[str, FlagValue]) -> None:
    with pytest.raises(SettingsInvalid):
        planned(set_flags=wrong)


# Speculative decoding


def test_a_draft_turns_drafting_on() -> None:
    """Seed 002: a draft model: spec-draft-model, its limits."""
    plan = planned(draft=DRAFT)
    assert value(plan, "--spec-draft-model") == "/models/draft.gguf"
    assert value(plan, "--spec-type") == "draft-simple"
    assert value(plan, "--spec-draft-n-max") == "8"
    assert planned("speculative", draft=DRAFT).slots == 2


def test_a_draft_can_be_set_as_a_flag() -> None:
    plan = planned(set_flags={"model-draft": "/d.gguf", "draft-max": 4})
    assert value(plan, "--spec-type") == "draft-simple"
    assert value(plan, "--spec-draft-n-max") == "4"


def test_idle_threads_leave_the_cores_to_a_draft_model() -> None:
    assert value(planned(draft=DRAFT), "--poll") == "0"
    assert value(planned(draft=DRAFT, set_flags={"poll": 100}), "--poll") == "100"
    assert "--poll" not in [line.flag for line in planned("speculative").lines]


def test_without_a_draft_ngrams_are_used() -> None:
    assert value(planned("speculative"), "--spec-type") == "ngram-mod"
    assert not [line for line in planned().lines if "spec" in line.flag]


def test_layers_of_the_models_own_draft() -> None:
    own = model(architecture="qwen35", draft_layers=1)
    drafting = line(planned("speculative", of=own), "--spec-type")
    assert (drafting.value, drafting.reason) == (
        "draft-mtp",
        "the model has layers that draft (MTP)",
    )
    without = line(planned("speculative", of=own, on=engine("b9109")), "--spec-type")
    assert without.value == "ngram-mod"
    assert without.reason.startswith("this build cannot draft with the model's own layers;")
    assert not [line for line in planned(of=own).lines if "spec" in line.flag]


def test_draft_heads_beside_the_model_draft() -> None:
    heads = model(path=Path("/models/head.gguf"), architecture="eagle3", drafts_for=576)
    for profile in ("speculative", "base"):
        assert value(planned(profile, draft=heads), "--spec-type") == "draft-eagle3"


def test_dspark_heads_without_confidence_draft_at_any_probability() -> None:
    heads = model(path=Path("/models/head.gguf"), architecture="dflash", drafts_for=576)
    assert value(planned(draft=heads), "--spec-type") == "draft-dflash"
    assert value(planned(draft=heads), "--spec-draft-p-min") == "0.5"
    heads = replace(heads, has_markov_head=True)
    assert value(planned(draft=heads), "--spec-type") == "draft-dspark"
    assert value(planned(draft=heads), "--spec-draft-p-min") == "0"
    sure = planned(draft=replace(heads, has_confidence_head=True))
    assert value(sure, "--spec-draft-p-min") == "0.5"
    own = planned(set_flags={"spec-draft-p-min": 0.2}, draft=heads)
    assert value(own, "--spec-draft-p-min") == "0.2"


def test_slots_that_share_a_cache_may_have_a_context_each() -> None:
    own: dict[str, FlagValue] = {"kv-unified": True, "kv-unified-per-slot": 3000, "parallel": 4}
    plan = planned(set_flags=own, on=engine("b11434"))
    assert value(plan, "--kv-unified-per-slot") == "3000"
    assert (value(plan, "--ctx-size"), plan.ctx_size) == ("12000", 12000)
    old = planned(set_flags=own)
    assert "--kv-unified-per-slot" not in old.argv(host="h", port=1)
    omitted = {line.flag: line.reason for line in old.omitted}
    assert omitted["--kv-unified-per-slot"] == "this build has no --kv-unified-per-slot"


def test_an_option_of_a_newer_build_than_any_recorded_is_known() -> None:
    plan = planned(set_flags={"moe-cache-mib": 2048, "n-cpu-moe": 8}, on=engine("b11434"))
    omitted = {line.flag: line.reason for line in plan.omitted}
    assert omitted["--moe-cache-mib"] == "this build has no --moe-cache-mib"
    newer = engine("b11434", flags=newest_flags())
    assert value(planned(set_flags={"moe-cache-mib": 2048}, on=newer), "--moe-cache-mib") == "2048"
    with pytest.raises(SettingsInvalid, match="moe-cache-mib = auto is invalid"):
        planned(set_flags={"moe-cache-mib": "auto"}, on=newer)


@pytest.mark.parametrize(
    ("profile", "own", "batch"),
    [
        ("speculative", {}, "130"),
        ("speculative", {"parallel": 8}, "520"),
        ("speculative", {"batch-size": 512}, "512"),
        ("speculative", {"batch-size": 512, "parallel": 8}, "520"),
        ("speculative", {"spec-type": "ngram-cache,ngram-simple"}, "128"),
        ("speculative", {"spec-ngram-mod-n-max": 15}, "128"),
        ("base", {}, "128"),
    ],
)
def test_a_batch_holds_the_drafts_of_all_slots(
    profile: str, own: Mapping[str, FlagValue], batch: str
) -> None:
    plan = planned(profile, own, at=machine(physical_cores=1))
    assert value(plan, "--batch-size") == batch


def test_an_invalid_draft_limit_is_rejected() -> None:
    with pytest.raises(SettingsInvalid, match="spec-draft-n-max = x is invalid"):
        planned(set_flags={"spec-draft-n-max": "x"}, draft=DRAFT)


def test_an_automatic_draft_has_a_reason() -> None:
    plan = planned(draft=DRAFT, draft_reason="the smallest beside it")
    assert line(plan, "--spec-draft-model").reason == "the smallest beside it"


def test_a_missing_draft_is_omitted_with_a_reason() -> None:
    """Seed 002: a missing draft model."""
    plan = planned(draft_reason="nothing smaller lies there")
    assert omitted(plan)["--spec-draft-model"] == "nothing smaller lies there"
    assert not [line for line in plan.lines if "spec" in line.flag]


# Warnings and sockets


def test_the_plan_includes_the_engines_warning() -> None:
    assert planned(on=engine(warning="it would die")).warnings == ("it would die",)


def test_unix_sockets_are_detected_from_the_help() -> None:
    assert unix_sockets(engine("b10434"))
    assert not unix_sockets(engine("b6324"))
