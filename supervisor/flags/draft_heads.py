"""Draft heads: layers that were trained to draft for one model. Pure.

A model may bring its own at its end (multi-token prediction, MTP), or they lie in a file beside it:
its MTP layers alone, or an EAGLE-3 head, which reads the states of some layers of the model.

Source: llama.cpp, common/speculative.cpp, and the models that have a graph_mtp; build 10434.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from supervisor.engines.help import Flags
from supervisor.engines.spec_types import MTP
from supervisor.gguf.metadata import Gguf

SIMPLE: Final = "draft-simple"
_EAGLE3: Final = "draft-eagle3"

# Files of other architectures may have such layers too, which the engine loads and does not use.
_MTP_ARCHITECTURES: Final = frozenset(
    {"cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "hy_v3", "mimo2"}
    | {"nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"}
)


def offered_types(flags: Flags) -> tuple[str, ...]:
    """The ways of drafting that a build has, by today's names."""
    found = flags.find("spec-type")
    return found.choices if found else ()


def draft_type(draft: Gguf) -> str:
    """The value of `--spec-type` with which a file drafts."""
    if draft.architecture == "eagle3":
        return _EAGLE3
    return MTP if draft.drafts_for else SIMPLE


def usable_type(draft: Gguf | None, model: Gguf, spec_types: Collection[str]) -> str | None:
    """The type of the draft model, or of the model's own draft layers; None without any."""
    if draft:
        return draft_type(draft)
    has_own = model.draft_layers and reason_against_mtp(model, spec_types) is None
    return MTP if has_own else None


def head_misfit(head: Gguf, model: Gguf) -> str | None:
    """Why a file of draft heads does not belong to a model, or None."""
    if draft_type(head) == MTP and head.architecture != model.architecture:
        return f"it drafts for {head.architecture}, not {model.architecture}"
    if head.drafts_for != model.embedding_length:
        return f"it drafts for a model of width {head.drafts_for}, not {model.embedding_length}"
    return None


def reason_against_mtp(model: Gguf, spec_types: Collection[str]) -> str | None:
    """Why the draft layers of a model cannot be used by a build that has these types, or None."""
    if MTP not in spec_types:
        return "this build cannot draft with the model's own layers"
    if model.architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp is not known to draft with layers of {model.architecture}"
    return None
