"""Where GGUF files are kept, by the environment. Reads only LM Studio's pointer file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.host.files import expanded, open_regular
from supervisor.model_stores.stored_model import Store

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
    home = expanded(Path("~")).absolute()  # `~` stays where there is no home
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
        yield from _named(environ, name)
    for path in _named(environ, "HF_HOME"):
        yield path / "hub"
    for path in _named(environ, "XDG_CACHE_HOME"):
        yield path / "huggingface" / "hub"
    yield home / ".cache" / "huggingface" / "hub"


def _llama_cpp(home: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Source: llama.cpp, common/common.cpp, fs_get_cache_directory."""
    yield from _named(environ, "LLAMA_CACHE")
    if sys.platform == "darwin":
        yield home / "Library" / "Caches" / "llama.cpp"
    for path in _named(environ, "XDG_CACHE_HOME"):
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
    if named := tuple(_named(environ, "OLLAMA_MODELS")):
        return named
    return (home / ".ollama" / "models", _OLLAMA_SERVICE)


def _named(environ: Mapping[str, str], name: str) -> Iterator[Path]:
    if text := environ.get(name):
        yield expanded(Path(text)).absolute()


def _first(paths: Iterable[Path]) -> Iterator[Path]:
    yield next(iter(paths))


def _unique(paths: Iterable[Path]) -> Iterator[Path]:
    yield from dict.fromkeys(paths)
