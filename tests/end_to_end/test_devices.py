"""Models on Mesa's software Vulkan device: some fit, others do not.

The engine computes there and logs its allocations; only the size of the device is not its own.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import software_device
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, rest_of, until
from support.device_daemon import (
    MIB,
    ON_DEVICE,
    TOTAL_MIB,
    ask,
    logged_mib,
    make_model,
    planned_mib,
    settings,
    write_profile,
)
from support.software_device import SmallDevice

from supervisor.builds.discover import Engine


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def device(corral: CorralCli, device_engine: Engine, tmp_path: Path) -> SmallDevice:
    """The device as one of 40 MiB."""
    corral.env |= software_device.SHOW | {"CORRAL_CACHE_DIR": str(tmp_path / "cache")}
    return software_device.write_engine(
        tmp_path, device_engine.path, TOTAL_MIB, device_engine.library_dirs
    )


@pytest.fixture
def configure(corral: CorralCli, device: SmallDevice, wide_model: Path) -> Callable[..., CorralCli]:
    def write(supervisor: str = "", **models: str) -> CorralCli:
        corral.configure(settings(device.engine, wide_model, supervisor, **models))
        return corral

    return write


def cached_tokens(corral: CorralCli, model: str) -> int:
    """Ask a model, always the same; return how much of the prompt its cache had."""
    status, text = ask(corral, model, "hello " * 50)
    assert status == 200
    cached: int = json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def listed_model(corral: CorralCli, model: str) -> dict[str, Any]:
    """Return the description of a model that clients get."""
    with urllib.request.urlopen(f"{corral.url}/v1/models", timeout=PATIENCE_S) as response:
        models: list[dict[str, Any]] = json.load(response)["data"]
    return next(entry for entry in models if entry["id"] == model)


def test_a_model_that_fits_is_loaded_and_another_one_after_it_has_left(
    configure: Callable[..., CorralCli], device: SmallDevice
) -> None:
    own = ON_DEVICE + "log-verbosity = 4\n"
    corral = configure(
        a=f"[models.a.flags]\n{own}",
        b=f"[models.b.flags]\n{own}",
        supervisor="device_memory_wait_s = 600",
    )
    corral.ok("start", "a")
    # The daemon reads the engine's output while it serves.
    until(lambda: logged_mib(corral, "a.0") == pytest.approx(planned_mib(corral, "a"), rel=0.1))
    device.set_free(int(TOTAL_MIB - planned_mib(corral, "a")))
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, corral, "b")
        # Its memory is listed as taken until the driver gives it back.
        until(lambda: corral.model_states()["a"] == "unloaded" and not corral.engines())
        listings = device.listings
        until(lambda: device.listings > listings + 1)
        assert not corral.engines()
        device.set_free(TOTAL_MIB)
        assert asked.result(PATIENCE_S)[0] == 200
    assert corral.model_states() == {"a": "unloaded", "b": "loaded"}
    assert "backoff" not in [event["after"] for event in corral.events("instance.state_changed")]
    until(lambda: logged_mib(corral, "b.0") == pytest.approx(planned_mib(corral, "b"), rel=0.1))


def test_a_model_that_never_fits_is_refused_before_a_start(
    configure: Callable[..., CorralCli],
) -> None:
    large = ON_DEVICE.replace("8192", "32768")
    corral = configure(a=f"[models.a.flags]\n{large}")
    failed = corral("start", "a")
    assert failed.returncode == 78
    assert "of Vulkan0, which has 40.0 MiB" in failed.stderr
    assert "this would fit: " in failed.stderr
    assert corral.engines() == []


def test_after_the_device_is_full_at_a_load_less_is_tried_and_shown(
    configure: Callable[..., CorralCli], corral: CorralCli, device: SmallDevice
) -> None:
    # A buffer for half of the context is the largest that the device has room for.
    corral.env |= software_device.limit_buffers(10 * MIB)
    write_profile(corral)
    configure(
        a='profile = "device"\n',
        b='profile = "device"\non_out_of_memory = "fail"\n',
        c='profile = "device"\n[models.c.flags]\nctx-size = 8192\n',
    )
    said = corral("start", "a")
    assert said.returncode == 0, said.stderr
    assert "a: ctx-size = 4096 for want of memory: with ctx-size = 8192" in said.stderr
    (given_up,) = corral.events("model.reduced")
    assert (given_up["key"], given_up["before"], given_up["after"]) == ("ctx-size", 8192, 4096)
    assert "a: ctx-size = 4096 for want of memory: with ctx-size = 8192" in corral.ok("status")
    assert corral.data("plan", "a")["ctx_size"] == 4096
    assert ask(corral, "a")[0] == 200
    assert listed_model(corral, "a")["context_length"] == 4096

    failed = corral("start", "b")
    assert failed.returncode == 1
    assert "the device's memory is full" in failed.stderr
    corral.ok("stop", "b")

    corral.ok("start", "c")  # its own settings stay
    kept = corral.data("plan", "c")
    assert (kept["ctx_size"], [*kept["reduced"]]) == (8192, ["cache-type-k", "cache-type-v"])


def test_all_that_may_be_given_up_is_tried_one_after_another(
    configure: Callable[..., CorralCli], corral: CorralCli
) -> None:
    corral.env |= software_device.limit_buffers(4 * MIB)  # for two layers of four, and the output
    write_profile(corral)
    configure(a='profile = "device"\n')
    corral.ok("start", "a")
    assert [(event["key"], event["after"]) for event in corral.events("model.reduced")] == [
        ("ctx-size", 4096),
        ("cache-type-k", "q8_0"),
        ("cache-type-v", "q8_0"),
        ("gpu-layers", 2),
    ]
    assert corral.instances()["a.0"].failures == 0
    assert ask(corral, "a")[0] == 200


def test_a_device_full_of_other_programs_is_waited_for_and_others_are_served_meanwhile(
    configure: Callable[..., CorralCli], device: SmallDevice
) -> None:
    patience = (
        "[supervisor.restart]\nbackoff_initial_s = 0.1\nbackoff_max_s = 0.1\nmax_failures = 1"
    )
    forbids = 'on_out_of_memory = "fail"\n'
    large, small = ON_DEVICE.replace("8192", "12288"), ON_DEVICE.replace("8192", "256")
    corral = configure(
        patience,
        a=f"{forbids}[models.a.flags]\n{large}",
        b=f"{forbids}[models.b.flags]\n{small}",
    )
    device.set_free(12)
    corral.serve(until_ready=False)
    until(corral.is_running)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, corral, "a")
        until(lambda: corral.instances()["a.0"].state == "backoff" and device.listings > 3)
        error = corral.instances()["a.0"].error
        assert error
        assert "of Vulkan0, which has 12.0 MiB free" in error["message"]
        assert corral.instances()["a.0"].pid is None
        assert "Vulkan0, which has 12.0 MiB free" in listed_model(corral, "a")["status"]["reason"]
        assert ask(corral, "b")[0] == 200
        device.set_free(TOTAL_MIB)
        assert asked.result(PATIENCE_S)[0] == 200


def test_other_programs_count_when_a_model_is_unloaded_for_another(
    configure: Callable[..., CorralCli], device: SmallDevice
) -> None:
    small = ON_DEVICE.replace("8192", "1024")
    corral = configure(
        "device_memory_wait_s = 0.2",
        a=f"[models.a.flags]\n{small}",
        b=f"[models.b.flags]\n{small}",
    )
    corral.ok("start", "a", "b")
    assert corral.model_states() == {"a": "loaded", "b": "loaded"}
    corral.ok("unload", "b")
    device.set_free(5)  # another program takes the remaining memory
    until(lambda: corral.model_states()["b"] == "unloaded")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, corral, "b")
        until(lambda: corral.model_states()["a"] == "unloaded")
        device.set_free(18)
        assert asked.result(PATIENCE_S)[0] == 200


def test_the_device_is_left_to_other_programs_and_taken_back(
    configure: Callable[..., CorralCli],
) -> None:
    small = ON_DEVICE.replace("8192", "1024")
    on_host = small.replace('"all"', "0\nop-offload = false")
    corral = configure(
        a=f"[models.a.flags]\n{small}",
        b=f"[models.b.flags]\n{small}",
        c=f"[models.c.flags]\n{on_host}",
    )
    corral.ok("start", "a", "c")
    for said in (corral.ok("yield", "1h"), corral.ok("status")):
        assert "the devices are left to other programs for" in said
        assert "stopped for that: a, b" in said
    assert corral.model_states() == {"a": "failed", "b": "failed", "c": "loaded"}
    status, text = ask(corral, "b")
    assert (status, "its devices are left to other programs" in text) == (503, True)
    assert ask(corral, "c")[0] == 200
    assert "the devices are in use again" in corral.ok("yield", "--end")
    assert corral.model_states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_an_idle_model_gives_way_to_a_program_and_returns_with_its_conversation(
    configure: Callable[..., CorralCli], corral: CorralCli, device: SmallDevice
) -> None:
    small = ON_DEVICE.replace("8192", "1024")
    configure(a=f"[models.a.flags]\n{small}", b=f"[models.b.flags]\n{small}")
    file = corral.root / "config" / "corral.toml"
    text = file.read_text("utf-8").replace("persist_slots = false", "persist_slots = true")
    text = text.replace("[models.b]", "[models.b]\npinned = true")
    rules = 'yield = "idle"\nreserve = "4 MiB"\ncheck_interval_s = 0.1\nreturn_after_s = 0.1'
    file.write_text(f"{text}\n[devices]\n{rules}\n", "utf-8")
    corral.ok("start", "a", "b")
    each = int(planned_mib(corral, "a"))

    def look() -> None:
        listings = device.listings
        until(lambda: device.listings > listings + 1)

    device.set_free(TOTAL_MIB - 2 * each)
    new = cached_tokens(corral, "a")
    look()
    assert corral.model_states() == {"a": "loaded", "b": "loaded"}

    device.set_free(2)  # a program allocates all but 2 MiB
    until(lambda: corral.model_states()["a"] == "unloaded")
    device.set_free(each + 2)
    look()
    assert corral.model_states() == {"a": "unloaded", "b": "loaded"}
    assert "a: unloaded because other programs need memory" in corral.ok("status")
    (given,) = corral.events("devices.yielded")
    assert (given["models"], given["reason"]) == ("a", "other programs")
    (event,) = corral.events("model.unloaded")
    assert event["reason"] == "other programs need memory of Vulkan0"

    device.set_free(TOTAL_MIB - each)  # the program ends
    until(lambda: corral.model_states()["a"] == "loaded")
    device.set_free(TOTAL_MIB - 2 * each)
    assert cached_tokens(corral, "a") > new
    assert [event["models"] for event in corral.events("devices.taken_back")] == ["a"]
    assert "unloaded because" not in corral.ok("status")


def test_a_busy_model_gives_way_once_it_has_answered_and_loads_with_less(
    configure: Callable[..., CorralCli], corral: CorralCli, device: SmallDevice
) -> None:
    write_profile(corral)
    configure(a='profile = "device"\n')
    file = corral.root / "config" / "corral.toml"
    rules = 'yield = "always"\nreserve = "4 MiB"\ncheck_interval_s = 0.1'
    file.write_text(f"{file.read_text('utf-8')}\n[devices]\n{rules}\n", "utf-8")
    corral.ok("start", "a")
    whole = int(planned_mib(corral, "a"))
    device.set_free(TOTAL_MIB - whole)

    def look() -> None:
        listings = device.listings
        until(lambda: device.listings > listings + 1)

    look()
    stream = begin_stream(corral, 40, model="a")
    device.set_free(2)  # a program allocates all but 2 MiB
    look()
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, corral, "a")
        text = rest_of(stream)
        assert '"finish_reason":"length"' in text
        assert "[DONE]" in text
        until(lambda: corral.events("model.unloaded") and not corral.engines())
        assert not asked.done()
        assert corral.events("devices.yielded")
        device.set_free(whole)  # of which the load leaves the reserve
        assert asked.result(PATIENCE_S)[0] == 200
    assert corral.data("plan", "a")["ctx_size"] == 4096
    assert planned_mib(corral, "a") < whole - 4
    assert "its memory had been left to another program for" in corral.ok("explain")


def test_a_successor_that_does_not_fit_beside_its_model_replaces_it_in_place(
    configure: Callable[..., CorralCli], corral: CorralCli, device: SmallDevice
) -> None:
    write_profile(corral)
    configure(a='profile = "device"\n')
    corral.ok("start", "a")
    device.set_free(10)
    configure(a='profile = "device"\n[models.a.flags]\ncache-reuse = 0\n')
    with ThreadPoolExecutor() as threads:
        reloaded = threads.submit(corral, "reload")
        until(lambda: not corral.engines())
        device.set_free(TOTAL_MIB)
        assert reloaded.result(PATIENCE_S).returncode == 0
    assert corral.model_states() == {"a": "loaded"}
    assert corral.events("model.reduced") == []


@pytest.mark.usefixtures("device")
def test_after_a_worker_is_full_at_a_load_less_is_tried(
    corral: CorralCli, wide_model: Path
) -> None:
    corral.env |= software_device.limit_buffers(10 * MIB)
    write_profile(corral)
    corral.configure(
        "[workers.here]\nlocal = true\n"
        f'[models.a]\npath = "{wide_model}"\nprofile = "device"\nworkers = ["here"]\n'
    )
    corral.serve(until_ready=False)  # on a busy machine the worker is waited for
    until(corral.is_running)
    assert ask(corral, "a")[0] == 200
    ((given_up,),) = [model.reduced for model in corral.status().models]
    assert (given_up.key, given_up.value) == ("ctx-size", 4096)
    assert given_up.reason == "with ctx-size = 8192, the memory of an RPC worker is full"
