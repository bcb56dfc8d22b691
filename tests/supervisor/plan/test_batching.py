"""`[models.NAME.batching]`: the seed's words as flags of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import engine as engines
from support import tiny_gguf
from support.samples import GIB, GPU, engine, machine, model

from supervisor.autoscale.slots import may_change_slots
from supervisor.builds.discover import Engine, load
from supervisor.builds.help import FlagValue
from supervisor.models import metadata
from supervisor.models.metadata import Gguf
from supervisor.plan.plan import Plan, PlanLine, TrialSettings, make_plan
from supervisor.plan.profile import load as load_profile
from supervisor.plan.resolve import OPTIONS, BatchingSettings, ModelEntry
from supervisor.plan.setting import Setting
from supervisor.settings.messages import batching_conflicts
from supervisor.settings.schema import ModelSettings
from supervisor.system import machine as host_machine
from supervisor.system.paths import shipped_directory

PROFILES = [shipped_directory("profiles")]
MORE = {"parallel": Setting(8, "demand", "4 requests waited")}
CHAT = Path("/models/chat.gguf")


def planned(
    batching: Mapping[str, Any],
    flags: Mapping[str, FlagValue] | None = None,
    *,
    profile: str = "base",
    of: Gguf | None = None,
    on: Engine | None = None,
    trial: TrialSettings | None = None,
    adapted: Mapping[str, Setting] | None = None,
    **here: Any,
) -> Plan:
    entry = ModelEntry(
        "chat", CHAT, profile, flags=flags or {}, batching=BatchingSettings(**batching)
    )
    return make_plan(
        trial.apply_to(entry) if trial else entry,
        load_profile(profile, PROFILES),
        on or engine(),
        of or model(),
        machine(**here),
        instances=1,
        adapted=adapted or {},
    )


def line(plan: Plan, flag: str) -> PlanLine:
    return next(line for line in plan.lines if line.flag == flag)


def number(plan: Plan, flag: str) -> int:
    return int(line(plan, flag).value or 0)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_ubatch_tokens", 96, PlanLine("--ubatch-size", "96", "batching", "max_ubatch_tokens")),
        (
            "max_sbatch_sequences",
            6,
            PlanLine("--parallel", "6", "batching", "max_sbatch_sequences"),
        ),
        (
            "max_context_length",
            3000,
            PlanLine(
                "--ctx-size",
                "12000",
                "batching",
                "max_context_length: 4 slots, 3000 tokens per slot",
            ),
        ),
        (
            "dynamic_batching",
            False,
            PlanLine("--no-cont-batching", None, "batching", "dynamic_batching"),
        ),
        (
            "dynamic_batching",
            True,
            PlanLine("--cont-batching", None, "batching", "dynamic_batching"),
        ),
    ],
)
def test_each_key_is_a_flag_of_the_engine(key: str, value: int, expected: PlanLine) -> None:
    """seed 001: BatchConfig's fields."""
    assert line(planned({key: value}), expected.flag) == expected


def test_unset_keys_change_nothing() -> None:
    """seed 001: BatchConfig."""
    assert planned({}).lines == planned({"prefer_pure_decode": False}).lines
    assert not BatchingSettings().settings()


def test_the_context_is_that_of_one_sequence() -> None:
    """seed 001: BatchConfig.max_context_length, SlotManager::new(num_slots, max_context_length)."""
    plan = planned({"max_sbatch_sequences": 3, "max_context_length": 2048})
    assert (plan.slots, plan.ctx_size) == (3, 3 * 2048)
    one_cache = planned({"max_context_length": 2048}, {"kv-unified": True})
    assert one_cache.ctx_size == 2048


def test_a_profile_gives_way() -> None:
    plan = planned({"max_sbatch_sequences": 3, "max_ubatch_tokens": 64}, profile="high-throughput")
    assert (plan.slots, number(plan, "--ubatch-size")) == (3, 64)


def test_a_set_number_of_sequences_does_not_follow_demand() -> None:
    """seed 001: BatchConfig.max_sbatch_sequences bounds the sequences of a batch."""
    settings = ModelSettings(path=CHAT)
    fixed = planned({"max_sbatch_sequences": 3}, adapted=MORE)
    assert fixed.slots == 3
    assert not may_change_slots(fixed, settings)


def test_slots_that_follow_demand_keep_the_set_context() -> None:
    plan = planned({"max_context_length": 3000})
    assert may_change_slots(plan, ModelSettings(path=CHAT))
    more = planned({"max_context_length": 3000}, adapted=MORE)
    assert (more.slots, more.ctx_size) == (8, 8 * 3000)


def test_a_batch_holds_a_whole_micro_batch() -> None:
    """seed 001: MicroBatch. The engine would cut it to --batch-size."""
    plan = planned({"max_ubatch_tokens": 4096})
    assert number(plan, "--batch-size") == number(plan, "--ubatch-size") == 4096


@pytest.mark.parametrize("devices", [(), (GPU,)], ids=["cpu", "gpu"])
def test_pure_decode_changes_no_flag(devices: tuple[Any, ...]) -> None:
    """seed 001: BatchConfig.prefer_pure_decode is the proxy's."""
    usual, pure = (
        planned({"prefer_pure_decode": on}, on=engine(devices=devices)) for on in (False, True)
    )
    assert pure.lines == usual.lines


def test_a_set_context_may_need_a_smaller_cache_type() -> None:
    given = {"max_context_length": 8192, "max_sbatch_sequences": 16}
    plan = planned(given, memory_bytes=6 * GIB)
    assert line(plan, "--cache-type-k").value == "q8_0"
    assert plan.ctx_size == 16 * 8192


def test_a_trial_wins_over_batching() -> None:
    trial = TrialSettings(share=0.5, flags={"np": 2, "ctx-size": 4096})
    plan = planned({"max_sbatch_sequences": 3, "max_context_length": 3000}, trial=trial)
    assert (plan.slots, plan.ctx_size) == (2, 4096)


@pytest.mark.parametrize(
    ("key", "value", "flag", "given"),
    [
        ("max_ubatch_tokens", 64, "ub", 64),
        ("max_sbatch_sequences", 3, "parallel", 3),
        ("max_context_length", 3000, "--ctx-size", "auto"),
        ("dynamic_batching", True, "no-cont-batching", True),
    ],
)
def test_the_same_option_in_flags_is_an_error(
    key: str, value: int, flag: str, given: FlagValue
) -> None:
    other = {"batch-size": 64}
    both = ModelSettings(path=CHAT, batching={key: value}, flags={flag: given, **other})
    (conflict,) = batching_conflicts({"chat": both})
    assert conflict[1] == (
        f"models.chat: batching.{key} and flags.{flag} set the same option of llama-server"
    )
    apart = ModelSettings(path=CHAT, batching={key: value}, flags={"no-such": 1, **other})
    assert not list(batching_conflicts({"chat": apart}))
    assert not list(batching_conflicts({"chat": ModelSettings(path=CHAT, flags={flag: given})}))


@pytest.mark.parametrize("key", OPTIONS)
def test_numbers_that_no_engine_takes_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        BatchingSettings(**{key: -1})


def test_the_engine_accepts_the_planned_batches(tmp_path: Path, runtime: Path) -> None:
    """seed 001: BatchConfig, as the engine itself reports it."""
    real = load(None, cache_dir=tmp_path)
    tiny = metadata.read(tiny_gguf.make(tmp_path / "tiny.gguf"), cache_dir=tmp_path)
    batching = BatchingSettings(
        max_ubatch_tokens=48,
        max_sbatch_sequences=3,
        max_context_length=512,
        dynamic_batching=False,
        prefer_pure_decode=True,
    )
    entry = ModelEntry("tiny", tiny.path, batching=batching)
    here = host_machine.read()
    plan = make_plan(entry, load_profile("base", PROFILES), real, tiny, here, instances=1)
    socket = str(runtime / "e.sock")
    with (
        engines.loading(real, plan.argv(host=socket, port=None)) as is_loaded,
        httpx.Client(
            base_url="http://engine",
            transport=httpx.HTTPTransport(uds=socket),
            headers={"Authorization": f"Bearer {engines.KEY}"},
        ) as http,
    ):
        assert is_loaded
        assert http.get("/props").json()["total_slots"] == 3
        assert [slot["n_ctx"] for slot in http.get("/slots").json()] == [512] * 3
