"""Models that settings name by what they are, not by a path: `path = "hf:OWNER/NAME:QUANT"`.

    hf:OWNER/NAME              a repository of Hugging Face: Q4_K_M, or else what is stored of it
    hf:OWNER/NAME:QUANT        one quantisation of it
    hf:OWNER/NAME:FILE.gguf    one file of it
    ollama:NAME[:TAG]          a model of Ollama's registry

They are looked for in every store, so that it does not matter which program fetched them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisor.errors import ModelInvalid, NoSuchModel
from supervisor.models import reference
from supervisor.models.catalogue import candidates
from supervisor.models.file_names import parse_file_name
from supervisor.models.local_stores import Root
from supervisor.models.reference import HubReference
from supervisor.models.stored_model import Candidate, StoredModel, open_candidate

HUB: Final = "hf:"
OLLAMA: Final = "ollama:"
_OLLAMA_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,79}(?:/[\w.-]{1,79}){0,2}(?::[\w.-]{1,79})?")
_LATEST: Final = "latest"
# What `llama-server -hf` takes of a repository. Source: llama.cpp, common/download.cpp.
_USUAL: Final = "Q4_K_M"


def is_reference(path: str | Path) -> bool:
    return str(path).startswith((HUB, OLLAMA))


def check(path: Path) -> Path:
    """Check the form of a reference; other paths pass. Raises ValueError."""
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
    """Look for the model of a reference in the stores; None if no whole one is there.

    Args:
        places: From `roots`.
        cache_dir: Of the metadata.
    """
    found = _candidate(str(path), places)
    return open_candidate(found, cache_dir) if found else None


def _candidate(text: str, places: Sequence[Root]) -> Candidate | None:
    notes = list[str]()
    stored = (
        candidate
        for root in places
        for candidate in candidates(root, notes)
        if not candidate.problem
    )
    if text.startswith(OLLAMA):
        name = text.removeprefix(OLLAMA)
        wanted = name if ":" in name else f"{name}:{_LATEST}"
        return next(
            (
                candidate
                for candidate in stored
                if candidate.store == "ollama" and candidate.name == wanted
            ),
            None,
        )
    found = reference.parse_reference(text.removeprefix(HUB))
    return _of_hub(found, stored) if isinstance(found, HubReference) else None


def _of_hub(wanted: HubReference, stored: Iterable[Candidate]) -> Candidate | None:
    """Return the first store's, of one store the wanted or usual quantisation."""
    found = [
        candidate for candidate in stored if _repository(candidate).lower() == wanted.repo.lower()
    ]
    if wanted.file:
        name = Path(wanted.file).name
        return next((candidate for candidate in found if candidate.path.name == name), None)
    labels = {candidate: _quantisation(candidate) for candidate in found}
    fitting = reference.matching(set(labels.values()), wanted.quantisation or _USUAL)
    exact = [candidate for candidate in found if labels[candidate] in fitting]
    return next(iter(exact or ([] if wanted.quantisation else found)), None)


def _repository(candidate: Candidate) -> str:
    """Return OWNER/NAME; Ollama names the host too: `hf.co/OWNER/NAME:TAG`."""
    name = candidate.name.partition(":")[0]
    return re.sub(r"^(hf\.co|huggingface\.co)/", "", name)


def _quantisation(candidate: Candidate) -> str:
    named = parse_file_name(candidate.path.name)
    return (named.quantisation if named else "") or candidate.name.rpartition(":")[2].upper()


def missing_model_error(path: Path, found: StoredModel | None) -> ModelInvalid:
    """Return the error for a reference to a model that is not stored, or cannot be served."""
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
