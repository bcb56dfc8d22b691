"""Finds GGUF files in our directory and in the stores of other programs.

The Hugging Face cache, which newer builds of llama.cpp share:

    models--OWNER--NAME/blobs/DIGEST             a file; DIGEST.incomplete during a download
    models--OWNER--NAME/snapshots/COMMIT/PATH    a link to it
    models--OWNER--NAME/refs/main                the commit of a branch
    .locks/models--OWNER--NAME/DIGEST.lock       held during a download

The flat cache of older builds of llama.cpp: for `-hf USER/REPO:TAG`, files USER_REPO_FILE.gguf, and
`manifest=USER=REPO=TAG.json` with their names in the repository.

Ollama's store:

    manifests/registry.ollama.ai/library/qwen3/8b  the manifest of qwen3:8b, with digests of blobs
    blobs/sha256-HEX                               a GGUF, a template, parameters, …

LM Studio's folder and ours have plain files, at best as PUBLISHER/REPOSITORY/FILE.

Sources: huggingface_hub, "Understand caching", "Manage huggingface_hub cache-system"; llama.cpp,
common/download.cpp before and common/hf-cache.cpp after March 2026; Ollama, docs (FAQ on the
storage of models), types/model/name.go, server/layer.go.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from supervisor.models.file_names import FileGroup, FileName, group
from supervisor.models.repository import RemoteFile, Repository
from supervisor.models.stored_model import Store, StoredModel, label, walk_files
from supervisor.system.files import expand_home, open_regular

_REF: Final = re.compile(r"[0-9a-f]{40}")


class HubCache:
    def __init__(self, root: Path) -> None:
        self.root = root

    def repository_dir(self, repo: str) -> Path:
        return self.root / f"models--{repo.replace('/', '--')}"

    def blob(self, repo: str, digest: str) -> Path:
        return self.repository_dir(repo) / "blobs" / digest

    def part(self, repo: str, digest: str) -> Path:
        """Return the path of a partial download, which huggingface_hub before 2.0 resumes too."""
        return self.blob(repo, digest).with_name(f"{digest}.incomplete")

    def lock(self, repo: str, digest: str) -> Path:
        return self.root / ".locks" / self.repository_dir(repo).name / f"{digest}.lock"

    def path(self, repository: Repository, file: str) -> Path:
        return self._snapshot(repository.repo, repository.commit) / file

    def is_here(self, repository: Repository, file: RemoteFile) -> bool:
        places = (self.blob(repository.repo, file.digest), self.path(repository, file.path))
        return any(_size(place) == file.size_bytes for place in places)

    def part_bytes(self, repository: Repository, file: RemoteFile) -> int:
        return _size(self.part(repository.repo, file.digest)) or 0

    def publish(self, repository: Repository, file: RemoteFile) -> Path:
        """Link a complete file to its name, set the commit of its branch, and return the path."""
        path, blob = self.path(repository, file.path), self.blob(repository.repo, file.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path) != file.size_bytes:
            draft = path.with_name(f".{secrets.token_hex(4)}.link")
            draft.symlink_to(os.path.relpath(blob, path.parent))
            draft.replace(path)
        if not _REF.fullmatch(repository.revision):
            ref = self._ref(repository.repo, repository.revision)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(repository.commit, "utf-8")
        return path

    def local(self, repo: str, revision: str) -> Repository | None:
        """Return the stored files of a repository at its last download; None without any."""
        commit = revision if _REF.fullmatch(revision) else self._commit(repo, revision)
        where = self._snapshot(repo, commit)
        paths = [path for path in where.rglob("*.gguf") if path.is_file()] if commit else []
        files = []
        for path in paths:
            name = path.resolve().name
            # On a file system without links, the file itself is here and its digest is unknown.
            digest = name if re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", name) else "0" * 40
            shown = path.relative_to(where).as_posix()
            files.append(RemoteFile(shown, path.stat().st_size, digest))
        if not files:
            return None
        return Repository(repo, revision, commit, {file.path: file for file in files})

    def _commit(self, repo: str, revision: str) -> str:
        try:
            text = self._ref(repo, revision).read_text("utf-8").strip()
        except (OSError, ValueError):
            return ""
        return text if _REF.fullmatch(text) else ""

    def _ref(self, repo: str, revision: str) -> Path:
        return self.repository_dir(repo) / "refs" / revision

    def _snapshot(self, repo: str, commit: str) -> Path:
        return self.repository_dir(repo) / "snapshots" / commit


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


_POINTER_MAX_BYTES: Final = 4096
# The store of Ollama's service on Linux. Source: its install.sh; OLLAMA_MODELS in its FAQ.
_OLLAMA_SERVICE: Final = Path("/usr/share/ollama/.ollama/models")


# A store, and a directory to search.
Root = tuple[Store, Path]


def roots(
    ours: Path, models_dirs: Sequence[Path], environ: Mapping[str, str] = os.environ
) -> tuple[Root, ...]:
    """Return all places to search, in the order in which models get their names.

    Source: huggingface_hub, constants.py; llama.cpp, common/common.cpp, fs_get_cache_directory.
    """
    home = expand_home(Path("~")).absolute()  # `~` stays if there is no home

    def at(name: str, below: str = "") -> list[Path]:
        text = environ.get(name)
        return [expand_home(Path(text)).absolute() / below] if text else []

    is_mac = sys.platform == "darwin"
    found: Mapping[Store, Sequence[Path]] = {
        "corral": [ours],
        "models_dir": models_dirs,
        "huggingface": at("HF_HUB_CACHE")
        or at("HUGGINGFACE_HUB_CACHE")
        or at("HF_HOME", "hub")
        or at("XDG_CACHE_HOME", "huggingface/hub")
        or [home / ".cache/huggingface/hub"],
        "llama.cpp": at("LLAMA_CACHE")
        or ([home / "Library/Caches/llama.cpp"] if is_mac else at("XDG_CACHE_HOME", "llama.cpp"))
        or [home / ".cache/llama.cpp"],
        "lmstudio": list(dict.fromkeys(_lm_studio(home))),
        "ollama": at("OLLAMA_MODELS") or [home / ".ollama/models", _OLLAMA_SERVICE],
    }
    return tuple((store, path) for store, paths in found.items() for path in paths)


def _lm_studio(home: Path) -> Iterator[Path]:
    """Yield the folder that LM Studio's pointer file names, and its two default folders."""
    text = _read_text(home / ".lmstudio-home-pointer", _POINTER_MAX_BYTES)
    if text and text.isprintable() and Path(text).is_absolute():
        yield Path(text) / "models"
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


def _read_text(path: Path, max_bytes: int) -> str:
    """Read a line that another program has written; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(max_bytes).decode("utf-8", "replace").strip()
    except OSError:
        return ""


# PUBLISHER/REPOSITORY/…/FILE
_REPOSITORY_PARTS = 3

# Returns the name of a model for a file and a tag: its quantisation, or its file name if several
# files have this quantisation.
NameOf = Callable[[FileName, str], str]


def search_folder(root: Path, store: Store, notes: list[str]) -> Iterator[StoredModel]:
    """Yield the models below a directory, named PUBLISHER/REPOSITORY:QUANT if it has such parts."""
    yield from _group_models(root, walk_files(root, notes), store, path_name)


def _group_models(
    root: Path, paths: Iterable[Path], store: Store, name_of: NameOf
) -> Iterator[StoredModel]:
    """Yield an unopened model for each group of files below a root."""
    below = {str(path.relative_to(root)): path for path in paths}
    groups = [file_group for file_group in group(below) if file_group.first.kind == "model"]
    firsts = [file_group.first for file_group in groups]
    short = [name_of(first, first.quantisation or _stem(first)) for first in firsts]
    count = Counter(short)
    for file_group, first, name in zip(groups, firsts, short, strict=True):
        files = tuple(below[part.path] for part in file_group.files)
        shown = name if count[name] == 1 else name_of(first, _stem(first))
        problem = _problem(file_group, files)
        yield StoredModel(shown, store, files[0], root, files=files, problem=problem)


def path_name(file: FileName, tag: str) -> str:
    """Name a file by its path, with a tag if that has a publisher and a repository."""
    parts = Path(file.prefix).parts
    if len(parts) < _REPOSITORY_PARTS:
        return label(parts[-1])
    return repository_name(parts[0], parts[1], file, tag)


def repository_name(publisher: str, repository: str, _file: FileName, tag: str) -> str:
    return label(publisher, f"{repository}:{tag}")


def _stem(file: FileName) -> str:
    return Path(file.prefix).name


def _problem(found: FileGroup, files: tuple[Path, ...]) -> str | None:
    if not found.is_complete:
        have, all_shards = len(found.files), found.first.shards
        return f"{all_shards - have} of its {all_shards} shards are missing"
    gone = [path for path in files if path.is_symlink() and not path.exists()]
    return f"the file behind the link {gone[0].name} is missing" if gone else None


_REVISION: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
_REPOSITORIES_MAX: Final = 2000


def search_cache(root: Path, store: Store, notes: list[str]) -> Iterator[StoredModel]:
    """Yield the models in the newest revision of each repository of a Hugging Face cache."""
    for directory in repositories(root, notes):
        found = re.fullmatch(r"models--([^-].*?)--(.+)", directory.name)
        if found and (snapshot := _snapshot(directory)):
            name_of = partial(repository_name, found[1], found[2])
            for model in _group_models(snapshot, walk_files(snapshot, notes), store, name_of):
                yield replace(model, root=root)


def repositories(root: Path, notes: list[str]) -> list[Path]:
    """Return the directories of models in a cache; notes a cache that cannot be read."""
    try:
        found = sorted(path for path in root.iterdir() if path.name.startswith("models--"))
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{root} cannot be read: {error.strerror}")
        return []
    if len(found) > _REPOSITORIES_MAX:
        notes.append(f"{root}: the search ended after {_REPOSITORIES_MAX:,} repositories")
    return found[:_REPOSITORIES_MAX]


def _snapshot(directory: Path) -> Path | None:
    """Return the snapshot of the branch `main`, or else the newest snapshot."""
    main = _read_text(directory / "refs" / "main", 256)
    named = directory / "snapshots" / main
    if _REVISION.fullmatch(main) and main.strip(".") and named.is_dir():
        return named
    try:
        found = [(path.stat().st_mtime, path) for path in (directory / "snapshots").iterdir()]
    except OSError:
        return None
    return max(found)[1] if found else None


_MANIFEST: Final = "manifest="
_MANIFEST_MAX_BYTES: Final = 1024**2


def search_flat_cache(root: Path, notes: list[str]) -> Iterator[StoredModel]:
    """Yield the models of a flat cache, named USER/REPO:TAG if they have a manifest."""
    found = list(search_folder(root, "llama.cpp", notes))
    manifests = dict(_manifests(root))
    for model in found:
        if known := manifests.get(model.path.name):
            name, projector = known
            beside = root / projector if projector else None
            exists = beside is not None and beside.is_file()
            yield replace(model, name=name, projector=beside if exists else None)
        else:
            yield model


def _manifests(root: Path) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield the file of each model with the model's name and the projector's file."""
    try:
        paths = sorted(path for path in root.iterdir() if path.name.startswith(_MANIFEST))
    except OSError:
        return
    for path in paths:
        parts = path.name.removeprefix(_MANIFEST).removesuffix(".json").split("=")
        if len(parts) != 3:
            continue
        user, repository, tag = parts
        content = _read_manifest(path)
        if model := _file_name(content, "ggufFile"):
            prefix = f"{user}_{repository}_"
            projector = _file_name(content, "mmprojFile")
            name = label(user, f"{repository}:{tag}")
            yield prefix + model, (name, projector and prefix + projector)


def _read_manifest(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(found := _read_json(path), dict):
            return found
    return {}


def _read_json(path: Path) -> Any:
    with open_regular(path) as file:
        return json.loads(file.read(_MANIFEST_MAX_BYTES))


def _file_name(content: dict[str, Any], key: str) -> str | None:
    found = content.get(key)
    name = found.get("rfilename") if isinstance(found, dict) else None
    return name.replace("/", "_") if isinstance(name, str) and "\0" not in name else None


_MEDIA: Final = "application/vnd.ollama.image."
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
# HOST/NAMESPACE/MODEL/TAG
_PARTS: Final = 4


def search_ollama(root: Path, notes: list[str]) -> Iterator[StoredModel]:
    """Yield the models of Ollama's store; `root` contains `manifests` and `blobs`."""
    manifests = root / "manifests"
    for path in walk_files(manifests, notes):
        parts = path.relative_to(manifests).parts
        if len(parts) == _PARTS:
            yield _add_layers(StoredModel(_name(parts), "ollama", path, root), root / "blobs")


def _name(parts: Sequence[str]) -> str:
    """Return the name that Ollama shows, which omits its own registry and library."""
    host, namespace, model, tag = parts
    shown = f"{model}:{tag}"
    if host != _REGISTRY:
        return label(host, namespace, shown)
    return label(shown) if namespace == _LIBRARY else label(namespace, shown)


def _add_layers(model: StoredModel, blobs: Path) -> StoredModel:
    """Replace the manifest's path by the files that it names, or add the problem with them."""
    try:
        listed = _read_layers(model.path)
        files = {
            kind: [_blob(layer, blobs) for layer in listed if _kind(layer) == kind]
            for kind in _KINDS
        }
    except _Broken as error:
        return replace(model, problem=str(error))
    if (count := len(files["model"])) != 1:
        return replace(model, problem=f"it has {count} GGUFs" if count else "it has no GGUF")
    projector = next(iter(files["projector"]), None)
    return replace(
        model, path=files["model"][0], projector=projector, adapters=tuple(files["adapter"])
    )


_KINDS: Final = ("model", "projector", "adapter")


class _Broken(Exception):
    """A manifest cannot be used; the text is a clause that says why."""


def _read_layers(manifest: Path) -> list[dict[str, Any]]:
    try:
        found = _read_json(manifest)
    except OSError as error:
        raise _Broken(f"its manifest cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _Broken("its manifest is damaged; ollama pull fetches it again") from error
    layers = found.get("layers") if isinstance(found, dict) else None
    if not isinstance(layers, list):
        raise _Broken("its manifest lists no layers; ollama pull fetches it again")
    return [layer for layer in layers if isinstance(layer, dict)]


def _kind(layer: dict[str, Any]) -> str:
    return str(layer.get("mediaType")).partition(";")[0].removeprefix(_MEDIA)


def _blob(layer: dict[str, Any], blobs: Path) -> Path:
    """Return the file of a layer; a digest cannot lead out of the directory of blobs."""
    digest = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", str(layer.get("digest")))
    if not digest:
        raise _Broken("its manifest names a digest that is none")
    path = blobs / f"sha256-{digest[1]}"
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise _Broken(f"its {_kind(layer)} blob {path.name[:19]}… is missing") from error
    except OSError as error:
        raise _Broken(f"its {_kind(layer)} blob cannot be read: {error.strerror}") from error
    if size_bytes != layer.get("size", size_bytes):
        raise _Broken(
            f"its {_kind(layer)} blob has {size_bytes:,} of {layer.get('size')} bytes; "
            "ollama pull fetches it again"
        )
    return path
