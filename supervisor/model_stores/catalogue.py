"""All models that are stored on this machine, each under a name of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.model_stores.candidate import Candidate, opened
from supervisor.model_stores.folder import in_folder
from supervisor.model_stores.huggingface import in_cache
from supervisor.model_stores.llama_cpp import in_flat_cache
from supervisor.model_stores.ollama import in_store
from supervisor.model_stores.roots import Root
from supervisor.model_stores.stored_model import Store, StoredModel
from supervisor.model_stores.walk import Walk

Search = Callable[[Path, Walk], Iterator[Candidate]]

_NOTHING: Final[Mapping[Path, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What was found, and why something was not looked at, as sentences."""

    models: tuple[StoredModel, ...]
    notes: tuple[str, ...] = ()

    def find(self, word: str) -> StoredModel | None:
        """Return the model of a name, or of the name as `[models.NAME]` has it.

        As with Ollama, a name without a tag stands for `NAME:latest`.
        """
        by_name = {model.id: model for model in self.models}
        by_name |= {model.name: model for model in self.models}
        return by_name.get(word) or by_name.get(f"{word}:latest")


def search(
    places: Sequence[Root],
    cache_dir: Path,
    taken: Collection[str] = (),
    pinned: Mapping[Path, str] = _NOTHING,
) -> Catalogue:
    """Look through every place where models are kept.

    Args:
        places: From `roots`.
        cache_dir: Of the metadata.
        taken: Names that others have.
        pinned: Names of files that have one already.
    """
    notes: list[str] = []
    found = (
        replace(one, name=pinned.get(one.path, one.name))
        for root in places
        for one in candidates(root, notes)
    )
    models = [model for one in found if (model := opened(one, cache_dir))]
    return Catalogue(tuple(named(_without_copies(models), taken)), tuple(notes))


def candidates(root: Root, notes: list[str]) -> Iterator[Candidate]:
    """Yield what may be models in one place, unopened; what was not seen is noted."""
    walk = Walk(root.path, notes=notes)
    for look in _SEARCHES[root.store]:
        yield from look(root.path, walk)


def _folder(store: Store) -> Search:
    return lambda root, walk: in_folder(root, store, walk)


def _cache(store: Store) -> Search:
    return lambda root, walk: in_cache(root, store, walk)


_SEARCHES: Final[Mapping[Store, tuple[Search, ...]]] = MappingProxyType(
    {
        "corral": (_folder("corral"),),
        "models_dir": (_folder("models_dir"),),
        "huggingface": (_cache("huggingface"),),
        "llama.cpp": (_cache("llama.cpp"), in_flat_cache),
        "lmstudio": (_folder("lmstudio"),),
        "ollama": (in_store,),
    }
)


def _without_copies(models: Iterable[StoredModel]) -> Iterator[StoredModel]:
    """Yield a file that several directories have once; the same blob may have several names."""
    seen: set[tuple[str, str]] = set()
    for model in models:
        key = (os.path.realpath(model.path), model.name)
        if key not in seen:
            seen.add(key)
            yield model


def named(models: Iterable[StoredModel], taken: Collection[str]) -> Iterator[StoredModel]:
    """Give each model a name of its own: the second one gets `@STORE` behind it, and a number."""
    names = set(taken)
    numbers: dict[str, Iterator[str]] = {}
    for model in models:
        longer = f"{model.name}@{model.store}"
        further = numbers.setdefault(longer, (f"{longer}-{number}" for number in count(2)))
        candidates = (replace(model, name=name) for name in chain((model.name, longer), further))
        found = next(one for one in candidates if not names & {one.name, one.id})
        names |= {found.name, found.id}
        yield found
