"""Reads a source of settings, and tells what kind it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from supervisor.conversion import command_line, compose, llama_swap, modelfile, router_preset
from supervisor.conversion.converted import Converted
from supervisor.engines.help import Flags
from supervisor.errors import SettingsInvalid

SourceKind = Literal["command", "compose", "llama-swap", "router", "modelfile"]
KINDS: Final[tuple[SourceKind, ...]] = get_args(SourceKind)
_SECTION: Final = re.compile(r"^[ \t]*\[[^\]\n]+\][ \t]*$", re.MULTILINE)
_MODELS: Final = re.compile(r"^models[ \t]*:", re.MULTILINE)
_SERVICES: Final = re.compile(r"^services[ \t]*:", re.MULTILINE)
_EXEC_START: Final = re.compile(r"^ExecStart=", re.MULTILINE)
_FROM: Final = re.compile(r"^[ \t]*FROM[ \t]+\S", re.MULTILINE | re.IGNORECASE)


def kind_of(text: str) -> SourceKind:
    """Tell the kind of a text. Raises SettingsInvalid: it is of none."""
    if _EXEC_START.search(text):
        return "command"
    if _MODELS.search(text):
        return "llama-swap"
    if _SERVICES.search(text):
        return "compose"
    if _FROM.search(text) and not _SECTION.search(text):
        return "modelfile"
    if _SECTION.search(text):
        return "router"
    if "llama" in text:
        return "command"
    raise SettingsInvalid(
        "this is not a llama-server command, compose file, llama-swap YAML, router preset or "
        "Modelfile",
        hint=f"--from says what it is: {', '.join(KINDS)}",
    )


def convert(
    text: str, kind: SourceKind, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> Converted:
    """Convert a text whose relative paths begin at a directory.

    Args:
        known: The options of the engine at hand; unset: those of the newest recorded build.

    Raises:
        SettingsInvalid: It is not of that kind.
    """
    match kind:
        case "command":
            return command_line.convert(text, base, known)
        case "compose":
            return compose.convert(text, base, environ, known)
        case "llama-swap":
            return llama_swap.convert(text, base, environ, known)
        case "router":
            return router_preset.convert(text, base, known)
        case "modelfile":
            return modelfile.convert(text, base, known)
