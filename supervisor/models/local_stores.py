"""Where people already have GGUF files: our directory, Hugging Face, llama.cpp, Ollama, LM Studio.

The directories of the Hugging Face cache, which other programs read and write too.

Source: huggingface_hub's "Understand caching"; llama.cpp's common/hf-cache.cpp uses the same
directories for `-hf`:

    models--OWNER--NAME/blobs/DIGEST             a file
    models--OWNER--NAME/snapshots/COMMIT/PATH    a link to it
    models--OWNER--NAME/refs/main                the commit of a branch
    .locks/models--OWNER--NAME/DIGEST.lock       held during a download

The Hugging Face cache, which newer builds of llama.cpp use too.

    models--ORG--REPO/refs/main           the name of a revision
    models--ORG--REPO/snapshots/REV/FILE  a link to blobs/DIGEST
    models--ORG--REPO/blobs/DIGEST.incomplete

Source: huggingface_hub's documentation, "Manage huggingface_hub cache-system"; llama.cpp,
common/hf-cache.cpp.

The cache of older builds of llama.cpp: files in one directory, with manifests beside them. `-hf
USER/REPO:TAG` wrote USER_REPO_FILE.gguf and `manifest=USER=REPO=TAG.json`, with the names of the
files in the repository. Newer builds use the Hugging Face cache, or LLAMA_CACHE like one.

Source: llama.cpp, common/download.cpp before and common/hf-cache.cpp after March 2026.

Ollama's store: manifests that name blobs by their digest.

    manifests/registry.ollama.ai/library/qwen3/8b  a manifest: qwen3:8b
    blobs/sha256-HEX                               a GGUF, a template, parameters, …

Source: Ollama, docs (FAQ: where models are stored), types/model/name.go, server/layer.go.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from supervisor.models.file_names import FileGroup, FileKind, FileName, group
from supervisor.models.repository import RemoteFile, Repository
from supervisor.models.stored_model import Candidate, Store, Walk, label
from supervisor.system.files import expand_home, open_regular

_DIGEST: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubCache:
    root: Path

    def repository_dir(self, repo: str) -> Path:
        return self.root / f"models--{repo.replace('/', '--')}"

    def blob(self, repo: str, digest: str) -> Path:
        return self.repository_dir(repo) / "blobs" / digest

    def part(self, repo: str, digest: str) -> Path:
        """Where a file grows; huggingface_hub before 2.0 continues it too."""
        return self.blob(repo, digest).with_name(f"{digest}.incomplete")

    def lock(self, repo: str, digest: str) -> Path:
        return self.root / ".locks" / self.repository_dir(repo).name / f"{digest}.lock"

    def path(self, repository: Repository, file: str) -> Path:
        """Where a file is found by its name."""
        return self._snapshot(repository.repo, repository.commit) / file

    def is_here(self, repository: Repository, file: RemoteFile) -> bool:
        places = (self.blob(repository.repo, file.digest), self.path(repository, file.path))
        return any(_size(place) == file.size_bytes for place in places)

    def part_bytes(self, repository: Repository, file: RemoteFile) -> int:
        return _size(self.part(repository.repo, file.digest)) or 0

    def publish(self, repository: Repository, file: RemoteFile) -> Path:
        """Give a whole file its name, and its branch the commit; return the path."""
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
        """Return what is here of a repository, as of the last download; None without any."""
        commit = revision if _REF.fullmatch(revision) else self._commit(repo, revision)
        where = self._snapshot(repo, commit)
        paths = [path for path in where.rglob("*.gguf") if path.is_file()] if commit else []
        files = [
            RemoteFile(path.relative_to(where).as_posix(), path.stat().st_size, _digest(path))
            for path in paths
        ]
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


def _digest(path: Path) -> str:
    """Return what a link tells; a file system without links has the file itself there."""
    name = path.resolve().name
    return name if _DIGEST.fullmatch(name) else "0" * 40


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


_POINTER_MAX_BYTES: Final = 4096
# Of Ollama's service on Linux. Source: its install.sh, OLLAMA_MODELS of its FAQ.
_OLLAMA_SERVICE: Final = Path("/usr/share/ollama/.ollama/models")


@dataclass(frozen=True, slots=True)
class Root:
    store: Store
    path: Path


def roots(
    ours: Path, models_dirs: Sequence[Path], environ: Mapping[str, str] = os.environ
) -> tuple[Root, ...]:
    """Return every place to look, in the order in which names are given."""
    home = expand_home(Path("~")).absolute()  # `~` stays where there is no home
    return (
        Root("corral", ours),
        *(Root("models_dir", path) for path in models_dirs),
        *(Root("huggingface", path) for path in _first(_huggingface(home, environ))),
        *(Root("llama.cpp", path) for path in _first(_llama_cpp(home, environ))),
        *(Root("lmstudio", path) for path in _unique(_lm_studio(home))),
        *(Root("ollama", path) for path in _ollama(home, environ)),
    )


def _huggingface(home: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Source: huggingface_hub, constants.py."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        yield from _path_from_environment(environ, name)
    for path in _path_from_environment(environ, "HF_HOME"):
        yield path / "hub"
    for path in _path_from_environment(environ, "XDG_CACHE_HOME"):
        yield path / "huggingface" / "hub"
    yield home / ".cache" / "huggingface" / "hub"


def _llama_cpp(home: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Source: llama.cpp, common/common.cpp, fs_get_cache_directory."""
    yield from _path_from_environment(environ, "LLAMA_CACHE")
    if sys.platform == "darwin":
        yield home / "Library" / "Caches" / "llama.cpp"
    for path in _path_from_environment(environ, "XDG_CACHE_HOME"):
        yield path / "llama.cpp"
    yield home / ".cache" / "llama.cpp"


def _lm_studio(home: Path) -> Iterator[Path]:
    """The folder that its pointer file names, and the two that it had by default."""
    try:
        with open_regular(home / ".lmstudio-home-pointer") as file:
            text = file.read(_POINTER_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    if text and text.isprintable() and Path(text).is_absolute():
        yield Path(text) / "models"
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


def _ollama(home: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    if named := tuple(_path_from_environment(environ, "OLLAMA_MODELS")):
        return named
    return (home / ".ollama" / "models", _OLLAMA_SERVICE)


def _path_from_environment(environ: Mapping[str, str], name: str) -> Iterator[Path]:
    if text := environ.get(name):
        yield expand_home(Path(text)).absolute()


def _first(paths: Iterable[Path]) -> Iterator[Path]:
    yield next(iter(paths))


def _unique(paths: Iterable[Path]) -> Iterator[Path]:
    yield from dict.fromkeys(paths)


# PUBLISHER/REPOSITORY/…/FILE
_REPOSITORY_PARTS = 3

# Names a file, with a tag: its quantisation, or its own name where several have that one.
NameOf = Callable[[FileName, str], str]


def in_folder(root: Path, store: Store, walk: Walk) -> Iterator[Candidate]:
    """Yield the models below a directory, by PUBLISHER/REPOSITORY:QUANT where it has such parts."""
    yield from of_files(root, walk.files(), store, path_name)


def of_files(
    root: Path, paths: Iterable[Path], store: Store, name_of: NameOf
) -> Iterator[Candidate]:
    """Yield one candidate for each model among files below a root."""
    below = {str(path.relative_to(root)): path for path in paths}
    groups = [file_group for file_group in group(below) if file_group.first.kind is FileKind.MODEL]
    short = Counter(
        name_of(file_group.first, _short_tag(file_group.first)) for file_group in groups
    )
    for file_group in groups:
        files = tuple(below[part.path] for part in file_group.files)
        name = name_of(file_group.first, _short_tag(file_group.first))
        if short[name] > 1:
            name = name_of(file_group.first, _stem(file_group.first))
        yield Candidate(
            name, store, files[0], root, files=files, problem=_problem(file_group, files)
        )


def path_name(file: FileName, tag: str) -> str:
    """Name a file by its path, with a tag where that has a publisher and a repository."""
    parts = Path(file.prefix).parts
    if len(parts) < _REPOSITORY_PARTS:
        return label(parts[-1])
    return repository_name(parts[0], parts[1], file, tag)


def repository_name(publisher: str, repository: str, _file: FileName, tag: str) -> str:
    return label(publisher, f"{repository}:{tag}")


def _short_tag(file: FileName) -> str:
    return file.quantisation or _stem(file)


def _stem(file: FileName) -> str:
    return Path(file.prefix).name


def _problem(found: FileGroup, files: tuple[Path, ...]) -> str | None:
    if not found.is_complete:
        have, all_shards = len(found.files), found.first.shards
        return f"{all_shards - have} of its {all_shards} shards are missing"
    gone = [path for path in files if path.is_symlink() and not path.exists()]
    return f"the file behind the link {gone[0].name} is missing" if gone else None


_REPOSITORY: Final = re.compile(r"models--([^-].*?)--(.+)")
_REVISION: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
_REPOSITORIES_MAX: Final = 2000
_REF_MAX_BYTES: Final = 256


def in_cache(root: Path, store: Store, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of all repositories of a cache, each by its newest revision."""
    for directory in repositories(root, walk):
        found = _REPOSITORY.fullmatch(directory.name)
        if found and (snapshot := _snapshot(directory)):
            inner = Walk(snapshot, walk.limits, walk.clock, walk.notes)
            name_of = partial(repository_name, found[1], found[2])
            for candidate in of_files(snapshot, inner.files(), store, name_of):
                yield replace(candidate, root=root)


def repositories(root: Path, walk: Walk) -> list[Path]:
    """Return the directories of models in a cache; those that cannot be listed are noted."""
    try:
        found = sorted(path for path in root.iterdir() if path.name.startswith("models--"))
    except FileNotFoundError:
        return []
    except OSError as error:
        walk.notes.append(f"{root} cannot be read: {error.strerror}")
        return []
    if len(found) > _REPOSITORIES_MAX:
        walk.notes.append(f"{root}: the search ended after {_REPOSITORIES_MAX:,} repositories")
    return found[:_REPOSITORIES_MAX]


def _snapshot(directory: Path) -> Path | None:
    """Return the snapshot of the branch `main`, or else the one that was written last."""
    named = directory / "snapshots" / (_main(directory) or "-")
    if named.is_dir():
        return named
    try:
        found = [(path.stat().st_mtime, path) for path in (directory / "snapshots").iterdir()]
    except OSError:
        return None
    return max(found)[1] if found else None


def _main(directory: Path) -> str | None:
    try:
        with open_regular(directory / "refs" / "main") as file:
            text = file.read(_REF_MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if _REVISION.fullmatch(text) and text.strip(".") else None


_MANIFEST: Final = "manifest="
_MANIFEST_MAX_BYTES: Final = 1024**2
_MANIFEST_PARTS: Final = 3
_STORE: Final = "llama.cpp"


def in_flat_cache(root: Path, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of a cache, by USER/REPO:TAG where a manifest says so."""
    found = list(in_folder(root, _STORE, walk))
    manifests = dict(_manifests(root))
    for candidate in found:
        if known := manifests.get(candidate.path.name):
            name, projector = known
            beside = root / projector if projector else None
            exists = beside is not None and beside.is_file()
            yield replace(candidate, name=name, projector=beside if exists else None)
        else:
            yield candidate


def _manifests(root: Path) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield the file of a model with its name and the file of its projector."""
    try:
        paths = sorted(path for path in root.iterdir() if path.name.startswith(_MANIFEST))
    except OSError:
        return
    for path in paths:
        parts = path.name.removeprefix(_MANIFEST).removesuffix(".json").split("=")
        if len(parts) != _MANIFEST_PARTS:
            continue
        user, repository, tag = parts
        content = _read_manifest(path)
        if model := _file_name(content, "ggufFile"):
            prefix = f"{user}_{repository}_"
            projector = _file_name(content, "mmprojFile")
            name = label(user, f"{repository}:{tag}")
            yield prefix + model, (name, projector and prefix + projector)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_MANIFEST_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _file_name(content: dict[str, Any], key: str) -> str | None:
    found = content.get(key)
    name = found.get("rfilename") if isinstance(found, dict) else None
    return name.replace("/", "_") if isinstance(name, str) and "\0" not in name else None


_MEDIA: Final = "application/vnd.ollama.image."
_BLOB_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
# HOST/NAMESPACE/MODEL/TAG
_PARTS: Final = 4


@dataclass(frozen=True, slots=True)
class Layers:
    """The files of a model, and why it is not complete, or None."""

    model: Path | None
    projector: Path | None = None
    adapters: tuple[Path, ...] = ()
    problem: str | None = None


def in_store(root: Path, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of a store (`root` is that of `manifests` and `blobs`)."""
    manifests = root / "manifests"
    for path in Walk(manifests, walk.limits, walk.clock, walk.notes).files():
        parts = path.relative_to(manifests).parts
        if len(parts) == _PARTS:
            found = _layers(path, root / "blobs")
            yield Candidate(
                _name(parts),
                "ollama",
                found.model or path,
                root,
                projector=found.projector,
                adapters=found.adapters,
                problem=found.problem,
                is_certain=True,
            )


def _name(parts: Sequence[str]) -> str:
    """As Ollama shows it: its own registry and library are left out."""
    host, namespace, model, tag = parts
    shown = f"{model}:{tag}"
    if host != _REGISTRY:
        return label(host, namespace, shown)
    return label(shown) if namespace == _LIBRARY else label(namespace, shown)


def _layers(manifest: Path, blobs: Path) -> Layers:
    try:
        listed = _read_layers(manifest)
        files = {
            kind: [_blob(layer, blobs) for layer in listed if _kind(layer) == kind]
            for kind in _KINDS
        }
    except _Broken as error:
        return Layers(None, problem=str(error))
    if len(files["model"]) != 1:
        count = len(files["model"])
        return Layers(None, problem="it has no GGUF" if not count else f"it has {count} GGUFs")
    projector = next(iter(files["projector"]), None)
    return Layers(files["model"][0], projector, tuple(files["adapter"]))


_KINDS: Final = ("model", "projector", "adapter")


class _Broken(Exception):
    """Why a manifest cannot be used, as a clause."""


def _read_layers(manifest: Path) -> list[dict[str, Any]]:
    try:
        with open_regular(manifest) as file:
            found = json.loads(file.read(_MANIFEST_MAX_BYTES))
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
    """Return the file of a layer: whatever the manifest says, one in the directory of blobs."""
    digest = _BLOB_DIGEST.fullmatch(str(layer.get("digest")))
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
