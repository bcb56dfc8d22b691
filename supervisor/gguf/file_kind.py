"""What a GGUF file holds, from its header. Pure.

Source: gguf-py, GGUFType, the values of `general.type`; llama.cpp, tools/mtmd/clip.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal

from supervisor.gguf.header import Header, Tensor

Kind = Literal["model", "projector", "draft", "adapter", "imatrix"]

_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "adapter": "adapter",
        "mmproj": "projector",
        "clip-vision": "projector",
        "imatrix": "imatrix",
    }
)
_ENCODER: Final = "clip"
_ENCODER_TENSORS: Final = ("v.", "mm.", "a.")


def file_kind(header: Header, *, drafts: bool) -> Kind:
    """Return what a file holds; `drafts`: draft heads for a model in another file."""
    if found := _KINDS.get(header.text("general.type")):
        return found
    if header.text("general.architecture") == _ENCODER:
        return "projector"
    return "draft" if drafts else "model"


def projection_width(header: Header) -> int:
    """Width of the model for which a projector makes tokens; 0 if unknown."""
    keys = (f"{_ENCODER}.{part}projection_dim" for part in ("vision.", "audio.", ""))
    return next((width for key in keys if (width := header.integer(key))), 0)


def holds_encoder(header: Header, tensors: Iterable[Tensor]) -> bool:
    """Whether a text model has its picture encoder in the same file, as Ollama's own engine does.

    llama.cpp refuses the file: it counts the tensors. Source: llama-model-loader.cpp,
    done_getting_tensors.
    """
    if header.text("general.architecture") == _ENCODER:
        return False
    return any(one.name.startswith(_ENCODER_TENSORS) for one in tensors)
