"""Plans against the installed engine, which must accept them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import engine as engines
from support import tiny_gguf

from supervisor.builds.discover import Engine, load
from supervisor.builds.help import FlagValue
from supervisor.models import metadata
from supervisor.plan.draft import Draft
from supervisor.plan.plan import Plan, make_plan, unix_sockets
from supervisor.plan.profile import load as load_profile
from supervisor.plan.profile import names
from supervisor.plan.resolve import ModelEntry
from supervisor.system import machine
from supervisor.system.paths import shipped_directory

PROFILES = shipped_directory("profiles")
# The flags of a program that ran an engine of 2025: this build has removed, deprecated or renamed
# most of those at the end.
OLD_FLAGS: dict[str, FlagValue] = {
    "ctx-size": 2048,
    "batch-size": 512,
    "ubatch-size": 256,
    "threads": 1,
    "n-gpu-layers": 99,
    "parallel": 2,
    "cont-batching": True,
    "flash-attn": True,
    "cache-type-k": "q8_0",
    "cache-type-v": "q8_0",
    "prio": 2,
    "mlock": True,
    "defrag-thold": 0.1,
    "draft-max": 8,
    "draft-min": 1,
    "draft-p-min": 0.6,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(None, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> metadata.Gguf:
    directory = tmp_path_factory.mktemp("tiny")
    return metadata.read(tiny_gguf.make(directory / "tiny.gguf"), cache_dir=directory)


def plan_of(
    engine: Engine,
    model: metadata.Gguf,
    profile: str = "base",
    flags: dict[str, FlagValue] | None = None,
    draft: metadata.Gguf | None = None,
) -> Plan:
    entry = ModelEntry("tiny", model.path, profile=profile, flags=flags or {})
    # A higher priority would slow other programs. A refused lock is only a warning.
    here = replace(machine.read(), memlock_bytes=None, may_renice=False)
    made = load_profile(profile, [PROFILES])
    return make_plan(entry, made, engine, model, here, instances=1, draft=Draft(draft))


def serves(plan: Plan) -> bool:
    """Whether the engine accepts the command line and loads the model."""
    with engines.loading(plan.engine, plan.argv(host="127.0.0.1", port=0)) as is_loaded:
        return is_loaded


def test_the_installed_engine_is_found_and_pinned(engine: Engine) -> None:
    assert (engine.source, engine.build) == ("package", 10434)
    assert engine.warning is None
    assert unix_sockets(engine)


@pytest.mark.parametrize("profile", names([PROFILES]))
def test_it_starts_with_every_profile(engine: Engine, tiny: metadata.Gguf, profile: str) -> None:
    assert serves(plan_of(engine, tiny, profile))
    assert serves(plan_of(engine, tiny, profile, draft=tiny))


def test_it_starts_with_the_flags_of_an_older_build(engine: Engine, tiny: metadata.Gguf) -> None:
    plan = plan_of(engine, tiny, flags={**OLD_FLAGS, "model-draft": str(tiny.path)})
    assert "--defrag-thold" in [line.flag for line in plan.omitted]
    assert "--load-mode" in [line.flag for line in plan.lines]
    assert serves(plan)
