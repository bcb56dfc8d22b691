"""What new settings change: every replica in one list, and only what runs counts."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.nodes.settings import NodeSettings
from proxy.settings import ProxySettings
from proxy.variant import Variant
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint, ReplicaId
from supervisor.reload.diff import compare, reload_notes
from supervisor.settings.schema import ModelSettings, Settings, SupervisorSettings

RECIPE = LaunchFingerprint(
    engine=FileVersion(Path("/opt/llama-server"), 1, 1),
    library_dirs=(),
    model=FileVersion(Path("/models/chat.gguf"), 100, 7),
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
def test_every_replica_stands_in_exactly_one_list(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    found = compare(running, wanted)
    listed = [*found.added, *found.removed, *found.changed, *found.kept]
    assert sorted(listed) == sorted({*running, *wanted})


@given(running=settings, wanted=settings)
def test_following_a_difference_leads_to_what_is_wanted(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    found = compare(running, wanted)
    after = {place: running[place] for place in found.kept}
    after |= {place: wanted[place] for place in (*found.added, *found.changed)}
    assert after == wanted
    assert not set(found.removed) & set(wanted)


@given(running=settings, wanted=settings)
def test_the_way_back_adds_what_the_way_there_removes(
    running: dict[ReplicaId, LaunchFingerprint], wanted: dict[ReplicaId, LaunchFingerprint]
) -> None:
    there, back = compare(running, wanted), compare(wanted, running)
    assert set(there.added) == set(back.removed)
    assert set(there.changed) == set(back.changed)
    assert set(there.kept) == set(back.kept)


@given(now=settings)
def test_the_same_again_keeps_everything(now: dict[ReplicaId, LaunchFingerprint]) -> None:
    found = compare(now, now)
    assert found.kept == tuple(now)
    assert not found.models_to_plan


@pytest.mark.parametrize(
    "other",
    [
        replace(RECIPE, engine=FileVersion(Path("/opt/llama-server"), 1, 2)),
        replace(RECIPE, library_dirs=(Path("/opt/lib"),)),
        replace(RECIPE, model=FileVersion(Path("/models/chat.gguf"), 100, 8)),
        replace(RECIPE, draft=FileVersion(Path("/models/draft.gguf"), 1, 1)),
        replace(RECIPE, flags={"ctx-size": 8192}),
        replace(RECIPE, args=("--verbose",)),
    ],
    ids=["engine", "libraries", "model file", "draft", "flags", "args"],
)
def test_whatever_shapes_the_command_line_replaces(other: LaunchFingerprint) -> None:
    found = compare({A: RECIPE, B: RECIPE}, {A: other, B: RECIPE})
    assert (found.changed, found.kept) == ((A,), (B,))
    assert found.models_to_plan == {"chat"}


def test_a_replica_of_which_nothing_is_known_is_changed() -> None:
    assert compare({A: None}, {A: RECIPE}).changed == (A,)


def test_a_place_reads_as_its_instance_does() -> None:
    assert str(ReplicaId("chat", 1)) == "chat.1"


def told(before: Settings, after: Settings, began_with: Settings | None = None) -> list[str]:
    return list(reload_notes(began_with or before, before, after))


def test_what_the_proxy_cannot_take_in_is_said_until_it_is_as_it_began() -> None:
    began = Settings(proxy=ProxySettings(listen="127.0.0.1:8080"))
    moved = Settings(proxy=ProxySettings(listen="127.0.0.1:9090"))
    said = ["proxy.listen stays 127.0.0.1:8080 until the daemon is restarted"]
    assert told(began, moved) == said
    assert told(moved, moved, began_with=began) == said
    assert told(moved, began, began_with=began) == []


def test_limits_are_said_to_count_from_the_next_state_on() -> None:
    (said,) = told(Settings(), Settings(supervisor=SupervisorSettings(warm_timeout_s=1)))
    assert "next state" in said


def test_new_aliases_are_named() -> None:
    def aliased(*aliases: str) -> Settings:
        return Settings(models={"chat": ModelSettings(path=Path("chat.gguf"), aliases=aliases)})

    assert told(aliased(), aliased("gpt-4o", "x")) == ["chat: its aliases are now gpt-4o, x"]
    assert told(aliased("x"), aliased()) == ["chat: its aliases are now none"]
    assert told(aliased("x"), aliased("x")) == []
    assert told(Settings(), aliased("x")) == []


def test_new_variants_and_nodes_are_named() -> None:
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
    assert told(before, after) == [
        "new nodes: new",
        "removed nodes: old",
        "changed nodes: both",
        "chat: its variants are now high",
    ]
