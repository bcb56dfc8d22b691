"""Changes of replicas by new settings."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.nodes.settings import NodeSettings
from proxy.request.variants import Variant
from proxy.settings import JobSettings, ProxySettings
from supervisor.fleet.launches import LaunchFingerprint, ReplicaId
from supervisor.fleet.reload import compare, reload_notes
from supervisor.settings.schema import ModelSettings, Settings, SupervisorSettings

RECIPE = LaunchFingerprint(
    engine=(Path("/opt/llama-server"), 1, 1),
    library_dirs=(),
    model=(Path("/models/chat.gguf"), 100, 7),
    draft=None,
    flags={"ctx-size": 4096},
    args=(),
)
A, B = ReplicaId("chat", 0), ReplicaId("code", 0)

fingerprints = st.sampled_from(
    [RECIPE, replace(RECIPE, args=("--x",)), replace(RECIPE, flags={"ctx-size": 8192})]
)
places = st.builds(ReplicaId, st.sampled_from(["chat", "code", "tiny"]), st.integers(0, 3))
settings = st.dictionaries(places, fingerprints)


@given(running=settings, wanted=settings)
def test_every_replica_is_in_exactly_one_list(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    found = compare(running, wanted)
    listed = [*found.added, *found.removed, *found.changed, *found.kept]
    assert sorted(listed) == sorted({*running, *wanted})


@given(running=settings, wanted=settings)
def test_applying_a_difference_gives_the_wanted_replicas(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    found = compare(running, wanted)
    after = {place: running[place] for place in found.kept}
    after |= {place: wanted[place] for place in (*found.added, *found.changed)}
    assert after == wanted
    assert not set(found.removed) & set(wanted)


@given(running=settings, wanted=settings)
def test_the_reverse_difference_adds_removed_models(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    there, back = compare(running, wanted), compare(wanted, running)
    assert set(there.added) == set(back.removed)
    assert set(there.changed) == set(back.changed)
    assert set(there.kept) == set(back.kept)


@given(now=settings)
def test_equal_settings_keep_every_replica(now: dict[ReplicaId, LaunchFingerprint]) -> None:
    found = compare(now, now)
    assert found.kept == tuple(now)
    assert (found.added, found.changed) == ((), ())


@pytest.mark.parametrize(
    "other",
    [
        replace(RECIPE, engine=(Path("/opt/llama-server"), 1, 2)),
        replace(RECIPE, library_dirs=(Path("/opt/lib"),)),
        replace(RECIPE, model=(Path("/models/chat.gguf"), 100, 8)),
        replace(RECIPE, draft=(Path("/models/draft.gguf"), 1, 1)),
        replace(RECIPE, flags={"ctx-size": 8192}),
        replace(RECIPE, args=("--verbose",)),
    ],
    ids=["engine", "libraries", "model file", "draft", "flags", "args"],
)
def test_a_changed_launch_fingerprint_replaces_the_replica(other: LaunchFingerprint) -> None:
    found = compare({A: RECIPE, B: RECIPE}, {A: other, B: RECIPE})
    assert (found.changed, found.kept) == ((A,), (B,))


def test_a_replica_without_a_fingerprint_is_changed() -> None:
    assert compare({A: None}, {A: RECIPE}).changed == (A,)


def test_a_replica_id_reads_as_its_instance() -> None:
    assert str(ReplicaId("chat", 1)) == "chat.1"


def notes(before: Settings, after: Settings, began_with: Settings | None = None) -> list[str]:
    return list(reload_notes(began_with or before, before, after))


def test_notes_name_proxy_settings_that_need_a_restart() -> None:
    began = Settings(proxy=ProxySettings(listen="127.0.0.1:8080"))
    moved = Settings(proxy=ProxySettings(listen="127.0.0.1:9090"))
    expected = ["proxy.listen stays 127.0.0.1:8080 until the daemon is restarted"]
    assert notes(began, moved) == expected
    assert notes(moved, moved, began_with=began) == expected
    assert notes(moved, began, began_with=began) == []


def test_notes_name_each_key_of_a_nested_table() -> None:
    after = Settings.model_validate({"proxy": {"batch": {"preset": "high_throughput"}}})
    expected = ["proxy.batch.preset stays default until the daemon is restarted"]
    assert notes(Settings(), after) == expected
    fallen = Settings.model_validate({"proxy": {"fallback": {"far": ["near"]}}})
    (note,) = notes(Settings(), fallen)
    assert note == "proxy.fallback.far stays unset until the daemon is restarted"


def test_a_new_default_model_needs_no_restart() -> None:
    after = Settings(proxy=ProxySettings(default_model="chat"))
    assert notes(Settings(), after) == ["the default model is now chat"]
    assert notes(after, Settings()) == ["the default model is now none"]
    assert notes(after, after, began_with=Settings()) == []


def test_new_prompt_rules_need_no_restart() -> None:
    after = Settings(proxy=ProxySettings(prompt_rules={"editor": ("move:date",)}))
    assert notes(Settings(), after) == ["clients with prompt rules are now editor"]
    assert notes(after, Settings()) == ["clients with prompt rules are now none"]


def test_notes_name_limits_of_jobs_that_need_a_restart() -> None:
    after = Settings(jobs=JobSettings(max_jobs=3))
    assert notes(Settings(), after) == ["jobs.max_jobs stays 64 until the daemon is restarted"]


def test_notes_say_when_new_limits_apply() -> None:
    (expected,) = notes(Settings(), Settings(supervisor=SupervisorSettings(warm_timeout_s=1)))
    assert "next state" in expected


def test_notes_name_new_aliases() -> None:
    def aliased(*aliases: str) -> Settings:
        return Settings(models={"chat": ModelSettings(path=Path("chat.gguf"), aliases=aliases)})

    assert notes(aliased(), aliased("gpt-4o", "x")) == ["chat: its aliases are now gpt-4o, x"]
    assert notes(aliased("x"), aliased()) == ["chat: its aliases are now none"]
    assert notes(aliased("x"), aliased("x")) == []
    assert notes(Settings(), aliased("x")) == []


def test_notes_name_a_new_fallback() -> None:
    chat = ModelSettings(path=Path("chat.gguf"))
    after = chat.model_copy(update={"fallback": ("small",)})
    found = notes(Settings(models={"chat": chat}), Settings(models={"chat": after}))
    assert found == ["chat: its fallback is now small"]


def test_notes_name_new_variants_and_nodes() -> None:
    high = Variant.model_validate({"temperature": 1})
    chat = ModelSettings(path=Path("chat.gguf"))
    after = Settings(
        models={"chat": chat.model_copy(update={"variants": {"high": high}})},
        nodes={name: NodeSettings(url="http://new") for name in ("both", "new")},
    )
    before = Settings(
        models={"chat": chat},
        nodes={name: NodeSettings(url="http://old") for name in ("both", "old")},
    )
    assert notes(before, after) == [
        "new nodes: new",
        "removed nodes: old",
        "changed nodes: both",
        "chat: its variants are now high",
    ]
