"""A removal deletes the files that only this model uses, and names those of others."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from support.stores_layout import HuggingFace, copied

from supervisor.models.catalogue import (
    bytes_of,
    files_to_remove,
    keeper_hint,
    leftovers,
    remove_files,
    search,
)
from supervisor.models.local_stores import Root
from supervisor.models.stored_model import Store, StoredModel

Files = dict[str, Path]


def only(root: Root, cache: Path, name: str) -> StoredModel:
    found = search([root], cache).find(name)
    assert found is not None
    return found


def left(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_a_model_of_the_cache_goes_with_its_blob_and_its_repository(
    tmp_path: Path, files: Files
) -> None:
    cache, model = HuggingFace(tmp_path / "hub"), files["model"].read_bytes()
    link = cache.add("org/tiny", "tiny-Q8_0.gguf", model)
    cache.add("org/tiny", "mmproj-F16.gguf", files["clip"].read_bytes())
    cache.add("org/other", "other-Q8_0.gguf", model)
    found = only(("huggingface", cache.root), tmp_path / "cache", "org/tiny:Q8_0")
    gone = files_to_remove(found)
    assert {link, link.resolve()} <= set(gone)
    assert bytes_of(gone) == len(model) + files["clip"].stat().st_size
    remove_files(gone, cache.root)
    assert not cache.repository("org/tiny").exists()
    assert len(left(cache.root)) == 3


def test_a_blob_of_another_file_stays(tmp_path: Path, files: Files) -> None:
    cache, model = HuggingFace(tmp_path / "hub"), files["model"].read_bytes()
    cache.add("org/tiny", "tiny-Q8_0.gguf", model)
    cache.add("org/tiny", "tiny-Q4_0.gguf", model)
    cache.add("org/tiny", "mmproj-F16.gguf", files["clip"].read_bytes())
    found = only(("huggingface", cache.root), tmp_path / "cache", "org/tiny:Q8_0")
    assert files_to_remove(found) == found.files
    remove_files(files_to_remove(found), cache.root)
    other = only(("huggingface", cache.root), tmp_path / "cache", "org/tiny:Q4_0")
    assert other.problem is None
    assert other.projector is not None


def test_a_link_out_of_the_cache_is_deleted_and_not_followed(tmp_path: Path, files: Files) -> None:
    cache = HuggingFace(tmp_path / "hub")
    outside = copied(files["model"], tmp_path / "elsewhere" / "blobs" / "tiny.gguf")
    link = cache.add("org/tiny", "tiny-Q8_0.gguf", b"x")
    link.unlink()
    link.symlink_to(outside)
    found = only(("huggingface", cache.root), tmp_path / "cache", "org/tiny:Q8_0")
    remove_files(files_to_remove(found), cache.root)
    assert outside.exists()
    assert not link.is_symlink()


@pytest.mark.parametrize(
    ("store", "hint"),
    [
        ("corral", None),
        ("ollama", "ollama rm tiny:1b"),
        ("lmstudio", "LM Studio"),
        ("models_dir", "rm /m/tiny.gguf"),
    ],
)
def test_programs_remove_their_own_models(store: Store, hint: str | None) -> None:
    model = StoredModel("tiny:1b", store, Path("/m/tiny.gguf"), Path("/m"))
    found = keeper_hint(model)
    assert found == hint or (hint and found and hint in found)


@pytest.fixture
def places(tmp_path: Path, files: Files) -> list[Root]:
    ours, cache = tmp_path / "models", HuggingFace(tmp_path / "hub")
    copied(files["model"], ours / "a" / "tiny.gguf")
    copied(files["clip"], ours / "a" / "mmproj-tiny.gguf")
    copied(files["clip"], ours / "b" / "mmproj-alone.gguf")
    copied(files["model"], ours / "b" / "split-00001-of-00002.gguf")
    copied(files["model"], ours / "c" / "tiny.gguf.part")
    copied(files["model"], ours / "wheels" / "tiny" / "x.whl")
    cache.add("org/tiny", "tiny-Q8_0.gguf", files["model"].read_bytes())
    cache.add("org/weights", "model.bin", b"not ours")
    blobs = cache.repository("org/tiny") / "blobs"
    (blobs / "abc.incomplete").write_bytes(b"half")
    (blobs / "busy.incomplete").write_bytes(b"half")
    copied(files["lora"], blobs / "unused")
    (cache.repository("org/weights") / "blobs" / "unused").write_bytes(b"weights")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "x.gguf.downloadInProgress").write_bytes(b"half")
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (1, 1))
    return [
        ("corral", ours),
        ("huggingface", cache.root),
        ("llama.cpp", tmp_path / "llama"),
        ("ollama", tmp_path / "gone"),
    ]


def test_leftovers_are_unfinished_downloads_and_unused_files(
    tmp_path: Path, places: list[Root]
) -> None:
    lock = tmp_path / "hub" / ".locks" / "models--org--tiny" / "busy.lock"
    lock.parent.mkdir(parents=True)
    notes: list[str] = []
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = {path.name: reason for path, _, reason in leftovers(places, notes)}
    unfinished = "an unfinished download"
    assert found == {
        "tiny.gguf.part": unfinished,
        "x.whl": unfinished,
        "mmproj-alone.gguf": "a projector without a model beside it",
        "split-00001-of-00002.gguf": "1 of the 2 shards of its model are missing",
        "abc.incomplete": unfinished,
        "unused": "a GGUF that no revision uses",
        "x.gguf.downloadInProgress": unfinished,
    }
    assert notes == []


def test_a_download_that_goes_on_is_left(tmp_path: Path, places: list[Root]) -> None:
    (tmp_path / "llama" / "x.gguf.downloadInProgress").touch()
    notes: list[str] = []
    found = [path.name for path, _, _ in leftovers(places, notes)]
    assert "x.gguf.downloadInProgress" not in found
    assert "written in the last 60 s" in notes[0]
