"""Finds stored models by reference instead of path: `path = "hf:OWNER/NAME:QUANT"`.

    hf:OWNER/NAME              a repository of Hugging Face: Q4_K_M, or else any stored model of it
    hf:OWNER/NAME:QUANT        one quantisation of it
    hf:OWNER/NAME:FILE.gguf    one file of it
    ollama:NAME[:TAG]          a model of Ollama's registry

All stores are searched, no matter which program downloaded the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisor.errors import ModelInvalid, NoSuchModel
from supervisor.models import reference
from supervisor.models.catalogue import unopened_models
from supervisor.models.file_names import parse_file_name
from supervisor.models.local_stores import Root
from supervisor.models.reference import HubReference
from supervisor.models.stored_model import StoredModel, open_model

HUB: Final = "hf:"
OLLAMA: Final = "ollama:"
_OLLAMA_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,79}(?:/[\w.-]{1,79}){0,2}(?::[\w.-]{1,79})?")
_LATEST: Final = "latest"
_HUB_HOST: Final = re.compile(r"^(hf\.co|huggingface\.co)/")
# The default quantisation of `llama-server -hf`. Source: llama.cpp, common/download.cpp.
_USUAL: Final = "Q4_K_M"


def is_reference(path: str | Path) -> bool:
    return str(path).startswith((HUB, OLLAMA))


def check(path: Path) -> Path:
    """Return the path; raises ValueError if it is a malformed reference."""
    text = str(path)
    if text.startswith(HUB):
        try:
            found = reference.parse_reference(text.removeprefix(HUB))
        except NoSuchModel as error:
            raise ValueError(f"{error.message}; {error.hint}") from error
        if not isinstance(found, HubReference):
            raise ValueError("not hf:OWNER/NAME:QUANT")
    elif text.startswith(OLLAMA) and not _OLLAMA_NAME.fullmatch(text.removeprefix(OLLAMA)):
        raise ValueError("not ollama:NAME:TAG")
    return path


def find(path: Path, places: Sequence[Root], cache_dir: Path) -> StoredModel | None:
    """Find the model of a reference in the stores; None if there is no complete one."""
    found = _find_unopened(str(path), places)
    return open_model(found, cache_dir) if found else None


def _find_unopened(text: str, places: Sequence[Root]) -> StoredModel | None:
    notes = list[str]()
    models = (model for root in places for model in unopened_models(root, notes))
    stored = (model for model in models if not model.problem)
    if text.startswith(OLLAMA):
        name = text.removeprefix(OLLAMA)
        wanted = name if ":" in name else f"{name}:{_LATEST}"
        return next(
            (model for model in stored if model.store == "ollama" and model.name == wanted), None
        )
    found = reference.parse_reference(text.removeprefix(HUB))
    return _choose_stored(found, stored) if isinstance(found, HubReference) else None


def _choose_stored(wanted: HubReference, stored: Iterable[StoredModel]) -> StoredModel | None:
    """Choose the wanted or usual quantisation of a repository, from the first store with it."""
    found = [
        model
        for model in stored
        # Ollama's names may contain the host: `hf.co/OWNER/NAME:TAG`.
        if _HUB_HOST.sub("", model.name.partition(":")[0]).lower() == wanted.repo.lower()
    ]
    if wanted.file:
        name = Path(wanted.file).name
        return next((model for model in found if model.path.name == name), None)
    labels = [_quantisation(model) for model in found]
    fitting = reference.matching(set(labels), wanted.quantisation or _USUAL)
    exact = [model for model, label in zip(found, labels, strict=True) if label in fitting]
    return next(iter(exact or ([] if wanted.quantisation else found)), None)


def _quantisation(model: StoredModel) -> str:
    named = parse_file_name(model.path.name)
    return (named.quantisation if named else "") or model.name.rpartition(":")[2].upper()


def missing_model_error(path: Path, found: StoredModel | None) -> ModelInvalid:
    text = str(path)
    if found:
        return ModelInvalid(
            f"{text} cannot be served: {found.problem}", hint=f"its file is {found.path}"
        )
    if text.startswith(OLLAMA):
        name = text.removeprefix(OLLAMA)
        hint = f"ollama pull {name} fetches it; corral model search {name} finds others"
    else:
        hint = f"corral model get {text.removeprefix(HUB)} fetches it"
    return ModelInvalid(f"{text} is not stored on this machine", hint=hint)
