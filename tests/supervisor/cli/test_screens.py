"""Screens of terminals of four widths, compared with files of `screens/`.

`UPDATE_SCREENS=1 pytest` writes these files; look at the difference before you commit it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.slot_files import NOON, manifest
from support.top_samples import STATUS, instance, model, request

from proxy.cache.save_policy import ModelCounts, OperationCounts
from proxy.observe.cache_finding import Tier
from proxy.router.slots import CacheContents, TierUse
from supervisor.cli import plan, report, requests, top_view
from supervisor.cli.status import render, tiers_text
from supervisor.daemon.cache_status import cache_status
from supervisor.daemon.control_messages import (
    AdaptedValue,
    CachesStatus,
    IdleStatus,
    NodeStatus,
    SlotDiskStatus,
    WeightStatus,
)
from supervisor.diagnose.host_checks import Finding
from supervisor.plan.estimate import MemoryBreakdown
from supervisor.plan.plan import PlanLine

SCREENS = Path(__file__).parent / "screens"
LONG = "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M"
PROBLEM = "the file is truncated: 12.0 GiB of 17.3 GiB; download it again with corral model get"
REQUESTS = [
    request("req_b5a3b8b6d74dfe3bf1a040dc", model=LONG, instance=f"{LONG}.0", age_s=65.0),
    request("req_0f3d2c1b9a8e7f6d5c4b3a29", phase="prefill", prompt_tokens=4000, decoded_tokens=0),
    request("my-own-id", phase="queued", position=2, instance=None, slot=None, priority="batch"),
]


def top(columns: int) -> str:
    failed = instance("code.0", state="failed", error={"message": PROBLEM}, slots_busy=0)
    models = [
        model(LONG, instance(f"{LONG}.0", slots=8, slots_busy=3, memory_bytes=19 * 1024**3)),
        model("code", failed, instance("code.1", state="starting", progress=0.43, slots_busy=0)),
    ]
    sample = top_view.Sample(replace(STATUS, models=models), REQUESTS)
    view = top_view.with_sample(top_view.View(selected=REQUESTS[0].id), sample)
    return "\n".join(top_view.screen(view, sample, (columns, 18), has_colour=False))


def status(columns: int) -> str:
    error = {"message": PROBLEM, "hint": f"corral model get {LONG}", "log": "/log/code.0.log"}
    failed = instance("code.0", state="failed", pid=None, error=error, slots_busy=0)
    chat = model(LONG, instance(f"{LONG}.0", slots=8, slots_busy=3, memory_bytes=19 * 1024**3))
    chat.idle = IdleStatus(limit_s=900.0, unload_in_s=65.0, origin="ttl_s")
    reason = "the engine ran out of memory while it loaded the model"
    chat.reduced = [AdaptedValue("ctx-size", 8192, "llama-corral", reason)]
    node = NodeStatus("gpu", "up", None, "http://gpu.lan:8080", [LONG, "code"], 8, 1, 0)
    weights = [
        WeightStatus(f"{LONG}.0", LONG, 1.0, "equal"),
        WeightStatus(f"gpu/{LONG}", LONG, 0.25, "measured"),
    ]
    models = [chat, model("code", failed)]
    found = replace(STATUS, models=models, nodes=[node], weights=weights, keyless=["0.0.0.0:80"])
    return render(found, columns)


def in_flight(columns: int) -> str:
    return requests.in_flight_rows(REQUESTS, columns)


def slots(columns: int) -> str:
    saved = [manifest("a", tokens=500, size_bytes=2 << 20)]
    use = {
        Tier.SLOT: TierUse(6, 60_000, 100.0),
        Tier.HOST_CACHE: TierUse(1, 500, 4.25),
        Tier.DISK: TierUse(2, 2500, 30.0),
        Tier.NONE: TierUse(3, 1000),
    }
    held = CacheContents(8, 5, 4000, 32 << 20, 3, 900, 4 << 20)
    counts: ModelCounts = {
        "save": OperationCounts(4, 1, 2000, 4 << 20, 0.08),
        "restore": OperationCounts(),
    }
    status = cache_status(LONG, saved, contents=held, use=use, counts=counts)
    disk = SlotDiskStatus(3 << 20, 8 << 30, written_bytes=5 << 20, write_limit_bytes=32 << 30)
    whole = CachesStatus(models=[status], disk=disk)
    return tiers_text(whole, NOON + timedelta(hours=2), columns)


def plan_flags(columns: int) -> str:
    flags = [
        PlanLine("--model", f"/home/me/models/{LONG}.gguf", "model chat", ""),
        PlanLine("--parallel", "2", "profile low-latency", ""),
        PlanLine("--no-ui", None, "llama-corral", "engines serve the proxy, not browsers"),
        PlanLine(
            "--cors-origins", "localhost", "llama-corral", "no foreign page may send requests"
        ),
        PlanLine(
            "--cache-type-k", "f16", "machine", "on a CPU q8_0 slows prefill, and memory suffices"
        ),
    ]
    main = MemoryBreakdown(weights=18 << 30, kv=3 << 30, compute=300 << 20, base=46 << 20)
    table = plan.memory_table({"main memory": main, "Vulkan0": main}, columns)
    return "\n".join([*plan.flag_lines(flags, columns), "", table])


def doctor(columns: int) -> str:
    found = [
        Finding("engine", "ok", "b10434, /usr/lib/llama/llama-server; 4 devices"),
        Finding(f"model {LONG}", "fail", PROBLEM, "corral model get Qwen/Qwen3-Coder-30B-A3B"),
        Finding("memory", "warn", "all models together need 31.0 GiB of 32.0 GiB", "set ttl_s"),
    ]
    return report.render(found, columns)


@pytest.mark.parametrize("columns", [60, 80, 130, 200])
@pytest.mark.parametrize("show", [top, status, in_flight, slots, plan_flags, doctor])
def test_a_screen_is_that_of_its_file(
    monkeypatch: pytest.MonkeyPatch, show: Callable[[int], str], columns: int
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = show(columns) + "\n"
    file = SCREENS / f"{show.__name__}-{columns}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")
    if show is not plan_flags:  # a path is never cut
        assert max(map(len, text.splitlines())) <= columns
