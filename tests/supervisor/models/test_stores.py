"""Each place is read as the program that owns it lays it out, and its faults are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.stores_layout import HuggingFace, Ollama, copied

from supervisor.models.catalogue import Catalogue, give_unique_names, search
from supervisor.models.stored_model import Store, StoredModel

Files = dict[str, Path]


def look(*places: tuple[Store, Path], cache: Path, taken: tuple[str, ...] = ()) -> Catalogue:
    return search([(store, path) for store, path in places], cache, taken)


def by_name(found: Catalogue) -> dict[str, StoredModel]:
    return {model.name: model for model in found.models}


def problems(found: Catalogue) -> dict[str, str | None]:
    return {model.name: model.problem for model in found.models}


def test_ollamas_models_have_the_names_that_ollama_shows(tmp_path: Path, files: Files) -> None:
    store = Ollama(tmp_path / "ollama")
    store.model("registry.ollama.ai/library/tiny/1b", model=files["model"], projector=files["clip"])
    store.model("registry.ollama.ai/someone/tiny/latest", model=files["model"])
    store.model("hf.co/org/repo/Q4_K_M", model=files["model"], adapter=files["lora"])
    found = by_name(look(("ollama", store.root), cache=tmp_path / "cache"))
    assert list(found) == ["hf.co/org/repo:Q4_K_M", "tiny:1b", "someone/tiny:latest"]
    assert all(model.problem is None and model.kind == "chat" for model in found.values())
    assert found["tiny:1b"].projector is not None
    assert found["tiny:1b"].projector.read_bytes() == files["clip"].read_bytes()
    assert len(found["hf.co/org/repo:Q4_K_M"].adapters) == 1
    assert found["hf.co/org/repo:Q4_K_M"].id == "hf.co--org--repo:Q4_K_M"


def test_ollamas_broken_models_are_listed_with_the_reason(tmp_path: Path, files: Files) -> None:
    store, library = Ollama(tmp_path / "ollama"), "registry.ollama.ai/library"
    content = files["model"].read_bytes()
    whole, cut = store.blob(content), store.blob(content[:5000])
    store.manifest(f"{library}/gone/1b", [("model", "sha256:" + "0" * 64, 1)])
    store.manifest(f"{library}/outside/1b", [("model", "sha256:../../../../etc/passwd", 1)])
    store.manifest(f"{library}/tensors/1b", [("tensor", whole, len(content))])
    store.manifest(f"{library}/short/1b", [("model", whole, len(content) + 1)])
    store.manifest(f"{library}/cut/1b", [("model", cut, 5000)])
    store.model(f"{library}/eyes/1b", model=files["clip"])
    (store.root / "manifests" / library / "text").mkdir()
    (store.root / "manifests" / library / "text" / "x").write_text("[" * 100_000)
    found = problems(look(("ollama", store.root), cache=tmp_path / "cache"))
    expected = {
        "gone:1b": "blob sha256-000000000000… is missing",
        "outside:1b": "digest that is none",
        "tensors:1b": "no GGUF",
        "short:1b": f"{len(content):,} of {len(content) + 1} bytes",
        "cut:1b": "truncated",
        "eyes:1b": "no model: projector",
        "text:x": "manifest is damaged",
    }
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert part in (found[name] or "")


def test_a_blob_that_may_not_be_read_is_not_taken_for_a_missing_one(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Ollama(tmp_path / "ollama")
    store.model("registry.ollama.ai/library/tiny/1b", model=files["model"])
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "blobs":
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    found = look(("ollama", store.root), cache=tmp_path / "cache")
    assert problems(found) == {"tiny:1b": "its model blob cannot be read: Permission denied"}


def test_the_hugging_face_cache_is_read_by_its_newest_revision(
    tmp_path: Path, files: Files
) -> None:
    cache = HuggingFace(tmp_path / "hub")
    model = files["model"].read_bytes()
    cache.add("org/Tiny-GGUF", "Tiny-Q8_0.gguf", model)
    cache.add("org/Tiny-GGUF", "mmproj-Tiny-F16.gguf", files["clip"].read_bytes())
    cache.add("org/Tiny-GGUF", "Tiny-Q2_K.gguf", model, "b" * 40)
    cache.link("org/Tiny-GGUF", "Tiny-Q4_0.gguf", "gone")
    cache.add("org/Split", "Q4_K_M/m-Q4_K_M-00002-of-00003.gguf", model)
    cache.add("org/no-model", "config.json", b"{}")
    (cache.root / "models--org--empty").mkdir()
    (cache.root / "version.txt").write_text("1")
    found = look(("huggingface", cache.root), cache=tmp_path / "cache")
    assert problems(found) == {
        "org/Split:Q4_K_M": "2 of its 3 shards are missing",
        "org/Tiny-GGUF:Q4_0": "the file behind the link Tiny-Q4_0.gguf is missing",
        "org/Tiny-GGUF:Q8_0": None,
    }
    whole = by_name(found)["org/Tiny-GGUF:Q8_0"]
    assert whole.projector == whole.path.with_name("mmproj-Tiny-F16.gguf")


def test_files_of_one_quantisation_are_told_apart_by_their_names(
    tmp_path: Path, files: Files
) -> None:
    cache = HuggingFace(tmp_path / "hub")
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf", "c.gguf"):
        cache.add("org/many", name, files["model"].read_bytes() + name.encode())
    found = look(("huggingface", cache.root), cache=tmp_path / "cache")
    assert list(by_name(found)) == ["org/many:a-Q8_0", "org/many:b-Q8_0", "org/many:c"]


def test_the_old_cache_of_llama_cpp_has_names_in_its_manifests(
    tmp_path: Path, files: Files
) -> None:
    root = tmp_path / "llama.cpp"
    copied(files["model"], root / "user_repo_tiny-Q8_0.gguf")
    copied(files["clip"], root / "user_repo_mmproj-tiny.gguf")
    copied(files["model"], root / "without-manifest.gguf")
    (root / "manifest=user=repo=Q8_0.json").write_text(
        '{"ggufFile": {"rfilename": "tiny-Q8_0.gguf"},'
        ' "mmprojFile": {"rfilename": "mmproj-tiny.gguf"}}'
    )
    (root / "manifest=user=repo=evil.json").write_text('{"ggufFile": {"rfilename": "../../x"}}')
    (root / "manifest=half.json").write_text("{")
    found = by_name(look(("llama.cpp", root), cache=tmp_path / "cache"))
    assert list(found) == ["user/repo:Q8_0", "without-manifest"]
    assert found["user/repo:Q8_0"].projector == root / "user_repo_mmproj-tiny.gguf"


def test_newer_builds_keep_repositories_where_llama_cache_says(
    tmp_path: Path, files: Files
) -> None:
    cache = HuggingFace(tmp_path / "llama")
    cache.add("org/tiny", "tiny-Q8_0.gguf", files["model"].read_bytes())
    found = look(("llama.cpp", cache.root), cache=tmp_path / "cache")
    assert "org/tiny:Q8_0" in by_name(found)


def test_parts_of_models_are_no_models(tmp_path: Path, files: Files) -> None:
    root = tmp_path / "models"
    copied(files["model"], root / "tiny.gguf")
    for name in ("mmproj-tiny.gguf", "eyes.gguf"):
        copied(files["clip"], root / name)
    for name in ("tiny-lora.gguf", "adapter.gguf"):
        copied(files["lora"], root / name)
    copied(files["model"], root / "other-00002-of-00002.gguf")
    (root / "notes.txt").write_text("x")
    found = problems(look(("models_dir", root), cache=tmp_path / "cache"))
    assert found == {"tiny": None, "other": "1 of its 2 shards are missing"}


def test_a_second_model_of_a_name_gets_its_store_behind_it(tmp_path: Path, files: Files) -> None:
    for directory in ("a", "b/deep", "c"):
        copied(files["model"], tmp_path / directory / "tiny.gguf")
    places: list[tuple[Store, Path]] = [
        ("corral", tmp_path / "a"),
        ("models_dir", tmp_path / "b"),
        ("models_dir", tmp_path / "c"),
    ]
    found = look(*places, cache=tmp_path / "cache")
    assert list(by_name(found)) == ["tiny", "tiny@models_dir", "tiny@models_dir-2"]
    found = look(*places, cache=tmp_path / "cache", taken=("tiny",))
    assert next(iter(by_name(found))) == "tiny@corral"


def test_any_number_of_models_may_have_one_name() -> None:
    model = StoredModel("tiny", "lmstudio", Path("/m/tiny.gguf"), Path("/m"))
    names = [name.name for name in give_unique_names([model] * 300, ())]
    assert names[:3] == ["tiny", "tiny@lmstudio", "tiny@lmstudio-2"]
    assert len(set(names)) == 300


def test_one_file_in_two_directories_is_listed_once(tmp_path: Path, files: Files) -> None:
    copied(files["model"], tmp_path / "real" / "tiny.gguf")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    places: list[tuple[Store, Path]] = [
        ("models_dir", tmp_path / "real"),
        ("lmstudio", tmp_path / "linked"),
    ]
    assert list(by_name(look(*places, cache=tmp_path / "cache"))) == ["tiny"]


def test_a_file_of_another_user_is_not_served_unless_its_directory_is_named(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(files["model"], tmp_path / "models" / "tiny.gguf")
    found = look(("lmstudio", path.parent), cache=tmp_path / "cache")
    assert problems(found) == {"tiny": None}
    path.chmod(0o666)
    found = look(("lmstudio", path.parent), cache=tmp_path / "cache")
    assert problems(found) == {"tiny": "every user can write it (mode 666)"}
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 54_321, -1)
    elif os.geteuid() >= 1000:
        monkeypatch.setattr("supervisor.system.ownership.os.geteuid", lambda: 54_321)
    else:
        pytest.skip("the files of this user count as those of a service")
    found = look(("lmstudio", path.parent), cache=tmp_path / "cache")
    assert "another user" in (problems(found)["tiny"] or "")
    named = look(("models_dir", path.parent), cache=tmp_path / "cache")
    assert problems(named) == {"tiny": None}


def test_names_that_no_setting_can_have_are_written_otherwise(tmp_path: Path, files: Files) -> None:
    copied(files["model"], tmp_path / "models" / "über alles.gguf")
    copied(files["model"], tmp_path / "models" / f"{'long' * 30}.gguf")
    found = look(("models_dir", tmp_path / "models"), cache=tmp_path / "cache")
    assert [len(model.id) for model in found.models] == [64, 9]
    assert found.find(found.models[0].id) is found.find("long" * 30) is found.models[0]
    assert found.models[1].name == "ber-alles"
