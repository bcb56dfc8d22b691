"""Causes and degradations provoked on the real engine, each by a file or flag that is wrong.

With test_engine.py these are the causes that any machine can bring about. A processor without the
instructions of the engine from PyPI brings one more. What needs a GPU, another build or a broken
device is tested in test_diagnose.py, on recorded text or on the text of the sources.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from support import tiny_gguf
from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, launch_of

from supervisor.builds.discover import engine_pins
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.launch import Launch
from supervisor.engine.states import State
from supervisor.system.machine import cpu_flags
from supervisor.system.paths import shipped_directory

SMALL = ("--ctx-size", "256", "--parallel", "1", "--threads", "1", "--offline")

LaunchOf = Callable[..., Launch]


@pytest.fixture
def real(engine_path: Path, engine_library_dirs: tuple[Path, ...], runtime: Path) -> LaunchOf:
    """Return a function that makes a launch of the real engine with a model."""

    def launch(model: Path, *argv: str) -> Launch:
        words = (str(engine_path), "--model", str(model), *SMALL, *argv)
        return launch_of(*words, runtime=runtime, library_dirs=engine_library_dirs)

    return launch


async def cause_of(launch: Launch) -> FailureCause:
    """Return the cause of a start that must fail for good.

    An engine that fails in its first milliseconds now and then exits before it has written a word:
    then the next try tells.
    """
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.FAILED, State.READY}))
    assert facts.cause
    assert facts.cause.permanent
    return facts.cause


async def degradations_of(launch: Launch) -> list[str]:
    """Return the features that a starting engine goes without."""
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(frozenset({State.READY}))
    return [warning.code for warning in facts.warnings]


def shard(source: Path, path: Path, number: int) -> Path:
    """Write a model again as one of two shards."""
    model, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    for field in model.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        if kind is gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), kind)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", len(model.tensors))
    for tensor in model.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("number", "reason"), [(1, "later shard"), (0, "-00002-of-00002.gguf")])
async def test_a_wrong_or_lonely_shard(
    real: LaunchOf, tiny_model: Path, tmp_path: Path, number: int, reason: str
) -> None:
    model = shard(tiny_model, tmp_path / f"m-0000{number + 1}-of-00002.gguf", number)
    cause = await cause_of(real(model))
    assert cause.code == "model_shard"
    assert reason in cause.sentence


async def test_an_unknown_architecture(real: LaunchOf, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "moon.gguf", "moon")
    writer.add_name("moon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    cause = await cause_of(real(tmp_path / "moon.gguf"))
    assert (cause.code, "moon" in cause.sentence) == ("architecture_unknown", True)


async def test_a_projector_that_is_none(real: LaunchOf, tiny_model: Path) -> None:
    cause = await cause_of(real(tiny_model, "--mmproj", str(tiny_model)))
    assert cause.code == "projector_invalid"


async def test_a_library_that_is_not_there(
    real: LaunchOf, engine_path: Path, tiny_model: Path, tmp_path: Path
) -> None:
    lonely = shutil.copy(engine_path, tmp_path / "llama-server")
    launch = real(tiny_model)
    argv = (str(lonely), *launch.argv[1:])
    env = {name: value for name, value in launch.env.items() if name != "LD_LIBRARY_PATH"}
    cause = await cause_of(replace(launch, argv=argv, env=env, cwd=tmp_path))
    assert cause.code == "library_missing"


async def test_a_processor_without_the_instructions_it_was_built_for(
    real: LaunchOf, smollm2: Path
) -> None:
    launch = real(smollm2)
    env = {name: value for name, value in launch.env.items() if name != "LD_LIBRARY_PATH"}
    bare = replace(launch, env=env)
    needed = {flag for pin in engine_pins(shipped_directory("vendor")) for flag in pin.cpu_flags}
    if needed <= cpu_flags():
        assert await degradations_of(bare) == []
        return
    cause = await cause_of(bare)
    assert cause.code == "illegal_instruction"
    assert "no-repack" in cause.hint


async def test_a_draft_of_another_vocabulary(
    real: LaunchOf, tiny_model: Path, tmp_path: Path
) -> None:
    draft = tiny_gguf.make(tmp_path / "draft.gguf", extra_tokens=200)
    speculating = ("--model-draft", str(draft), "--spec-type", "draft-simple")
    assert await degradations_of(real(tiny_model, *speculating)) == ["draft_unused"]


async def test_a_worker_that_does_not_answer(real: LaunchOf, tiny_model: Path) -> None:
    assert await degradations_of(real(tiny_model, "--rpc", "127.0.0.1:1")) == ["rpc_unused"]


async def test_a_flag_that_is_deprecated(real: LaunchOf, tiny_model: Path) -> None:
    assert "flag_deprecated" in await degradations_of(real(tiny_model, "--mlock"))


async def test_a_priority_that_is_not_granted(real: LaunchOf, tiny_model: Path) -> None:
    launch = real(tiny_model, "--prio", "3")
    if os.geteuid() == 0:
        # Root may do all of this, unless it gives the right away.
        giving_up = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice")
        launch = replace(launch, argv=(*giving_up, *launch.argv))
    assert await degradations_of(launch) == ["priority_refused"]
