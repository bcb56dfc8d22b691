"""`[models.NAME.loras]`: LoRA adapters that requests choose by name.

An engine loads all of them with scale 0, so that whatever says nothing of them, such as a health
check, is computed without. It keeps no prompts in main memory then: it finds them by their tokens
alone, whichever adapter they were computed with (build 10434: 145 of 146 tokens of another
adapter's prompt taken over, and another text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from proxy.config.types import ExpandedPath, SettingsTable
from supervisor.errors import SettingsInvalid
from supervisor.flags.setting import CORRAL, Setting
from supervisor.gguf.metadata import Gguf

SCALED: Final = "lora-scaled"
LORAS_MAX: Final = 64
_OPTIONS: Final = frozenset({"lora", SCALED, "lora-init-without-apply"})
# The engine separates paths and scales by them. Source: common/arg.cpp, --lora-scaled.
_SEPARATORS: Final = frozenset(':,"')


def _adapter_path(path: Path) -> Path:
    if found := sorted(_SEPARATORS.intersection(str(path))):
        raise ValueError(f"llama-server takes no adapter with {found[0]} in its path")
    return path


AdapterPath = Annotated[ExpandedPath, AfterValidator(_adapter_path)]


class LoraSettings(SettingsTable):
    """An adapter with a scale of its own."""

    path: AdapterPath = Field(description="the GGUF file of the adapter")
    scale: float = Field(1.0, ge=-100, le=100, description="how much of it MODEL+NAME means")


LoraSetting = AdapterPath | LoraSettings


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter; its id for the engine is its place."""

    name: str
    path: Path
    scale: float = 1.0


def loras_of(table: Mapping[str, LoraSetting]) -> tuple[Lora, ...]:
    return tuple(
        Lora(name, one.path, one.scale) if isinstance(one, LoraSettings) else Lora(name, one)
        for name, one in table.items()
    )


def resolved(table: Mapping[str, LoraSetting], base: Path) -> dict[str, LoraSetting]:
    """Join relative paths to a directory."""
    return {
        name: one.model_copy(update={"path": base / one.path})
        if isinstance(one, LoraSettings)
        else base / one
        for name, one in table.items()
    }


def conflict(flags: Mapping[str, object], args: Sequence[str]) -> str | None:
    """Return the option by which a model loads adapters without a name, or None."""
    words = (word.partition("=")[0] for word in args if word.startswith("--"))
    given = (name.lstrip("-") for name in (*flags, *words))
    return next((name for name in given if name in _OPTIONS), None)


def lora_settings(loras: Sequence[Lora]) -> dict[str, Setting]:
    """Return the options that load adapters; they win over all others."""
    if not loras:
        return {}
    listed = ",".join(f"{one.path}:0" for one in loras)
    reason = "requests choose: " + ", ".join(one.name for one in loras)
    unsafe = "the engine would answer with the cached prompt of another adapter"
    return {
        SCALED: Setting(listed, CORRAL, reason),
        "lora-init-without-apply": Setting(value=True, origin=CORRAL, reason=reason),
        "cache-ram": Setting(0, CORRAL, unsafe),
    }


def check(name: str, found: Gguf, model: Gguf) -> None:
    """Check that a file is an adapter of a model.

    Raises:
        SettingsInvalid: It is none, or one of another architecture, or the model generates nothing.
    """
    if found.kind != "adapter":
        problem = f"{found.path} is no LoRA adapter but a {found.kind}"
    elif found.architecture != model.architecture:
        problem = f"{found.path} is for {found.architecture}, the model is {model.architecture}"
    elif not model.is_causal or model.pooling is not None:
        problem = "adapters are for models that generate text"
    else:
        return
    raise SettingsInvalid(
        f"loras.{name}: {problem}", hint="convert_lora_to_gguf.py of llama.cpp makes adapters"
    )
