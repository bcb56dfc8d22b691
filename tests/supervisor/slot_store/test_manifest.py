import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import engine, model
from support.slot_files import manifest

from proxy.cache.fingerprint import ConversationFingerprint
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan, PlanLine
from supervisor.slot_store.manifest import ManifestInvalid, cache_key, dump, load


def plan(*words: tuple[str, str | None]) -> Plan:
    lines = tuple(PlanLine(flag, value, "model chat", "") for flag, value in words)
    made = engine()
    memory_inputs = MemoryInputs(model(), {}, made, frozenset(), None)
    return Plan(
        "chat", made, model(), lines, (), (), slots=2, ctx_size=2048, memory_inputs=memory_inputs
    )


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert load(dump(manifest())) == manifest()


@pytest.mark.parametrize(
    ("scales", "adapters"),
    [((), []), ((0.0, 0.0), []), ((1.0, 0.0), ["legal"]), ((1.0, 0.5), ["legal", "poet 0.5"])],
)
def test_a_manifest_names_the_adapters_of_its_conversation(
    tmp_path: Path, scales: tuple[float, ...], adapters: list[str]
) -> None:
    files = [tmp_path / f"{name}.gguf" for name in ("legal", "poet")]
    for file in files:
        file.write_bytes(b"GGUF")
    value = ",".join(f"{file}:0" for file in files)
    fingerprint = ConversationFingerprint((1,), (2,), scales).to_ascii()
    saved = manifest(identity=cache_key(plan(("--lora-scaled", value))), fingerprint=fingerprint)
    assert saved.adapters == adapters


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        dump(manifest()).replace("1000", "1001"),
        dump(manifest()).replace("f16", "q8_0"),
        dump(manifest()).replace('"format": 3', '"format": 1'),
        dump(manifest())[:-20],
    ],
)
def test_what_is_no_manifest_or_was_altered_is_refused(text: str) -> None:
    with pytest.raises(ManifestInvalid):
        load(text)


def test_a_manifest_of_an_earlier_version_has_a_sha256() -> None:
    content = json.loads(dump(manifest()))
    content["sha256"] = "0" * 64
    del content["checksum"], content["check"]
    check = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert load(json.dumps({**content, "check": check})) == manifest(checksum="0" * 64)


def test_a_manifest_of_another_format_is_refused_though_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("supervisor.slot_store.manifest.FORMAT", 1)
    earlier = dump(manifest())
    assert load(earlier) == manifest()
    monkeypatch.undo()
    with pytest.raises(ManifestInvalid, match="another format"):
        load(earlier)


BASE = (("--cache-type-k", "f16"), ("--threads", "4"), ("--parallel", "2"))


@pytest.mark.parametrize(
    "words",
    [
        (("--cache-type-k", "q8_0"), *BASE[1:]),
        (*BASE[:2], ("--parallel", "4")),
        (*BASE, ("--lora", "a.gguf")),
        (*BASE, ("--swa-full", None)),
        (*BASE, ("--an-option-of-later-builds", "1")),
    ],
)
def test_an_option_that_changes_a_cache_changes_its_key(
    words: tuple[tuple[str, str | None], ...],
) -> None:
    assert cache_key(plan(*words)) != cache_key(plan(*BASE))


def test_what_changes_no_cache_changes_nothing() -> None:
    other = (BASE[0], ("--threads", "8"), BASE[2], ("--metrics", None), ("--cache-ram", "64"))
    assert cache_key(plan(*other)) == cache_key(plan(*BASE))


def test_another_model_or_build_is_another_thing() -> None:
    ours = plan(*BASE)
    assert cache_key(replace(ours, gguf=model(fingerprint="1" * 32))) != cache_key(ours)
    assert cache_key(replace(ours, engine=engine("b11434"))) != cache_key(ours)


def test_a_model_without_a_kv_cache_has_the_same_state_for_any_number_of_slots() -> None:
    two, four = (plan(("--parallel", count)) for count in "24")
    assert cache_key(two) != cache_key(four)
    mamba = model(kv_heads=(0, 0), recurrent=True)
    assert cache_key(replace(two, gguf=mamba)) == cache_key(replace(four, gguf=mamba))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--lora", "{0}"),
        ("--lora", "{1},{0}"),
        ("--lora-scaled", "{1}:1,{0}:0.5"),
        ("--control-vector", "{0}"),
        ("--control-vector-scaled", "{0}:0.5,{1}:1"),
    ],
)
def test_an_adapter_that_was_replaced_is_another_one(
    tmp_path: Path, option: str, value: str
) -> None:
    adapters = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for adapter in adapters:
        adapter.write_bytes(b"one")
    ours = plan((option, value.format(*adapters)))
    before = cache_key(ours)
    assert cache_key(ours) == before
    adapters[0].write_bytes(b"other")
    assert cache_key(ours) != before
