"""A `llama-server` command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.conversion.converted import Converted, ConvertedModel
from supervisor.conversion.flags import ModelOptions, options_of, resolved, unique
from supervisor.errors import SettingsInvalid
from supervisor.hub import file_names

PROGRAMS: Final = ("llama-server", "server", "llama")
_DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = "8080"


def split(text: str) -> list[str]:
    """Split a command as a shell does, with comments and line continuations.

    Raises:
        SettingsInvalid: A quotation mark is not closed.
    """
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise SettingsInvalid(f"the command cannot be read: {str(error).lower()}") from error


def program_options(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the program of a command and its options; None if it is not llama-server.

    Variables before the program, and a program that starts another (`nice`, `numactl`), are left
    out.
    """
    for index, word in enumerate(words):
        if (name := Path(word).name.removesuffix(".exe")) and name.startswith(PROGRAMS):
            rest = list(words[index + 1 :])
            is_unified = name == "llama"
            return word, rest[1:] if is_unified and rest[:1] == ["serve"] else rest
        if word.startswith("-") and index == 0:
            return "llama-server", list(words)
    return None


def read_options(words: Sequence[str]) -> ModelOptions:
    found = ModelOptions()
    for name, value in options_of(words):
        if name.startswith("-"):
            found.take(name, value)
        else:
            found.notes.append(f"{name}: not an option")
    return found


def convert(words: Sequence[str], base: Path) -> Converted:
    """Convert a command line whose relative paths begin at a directory.

    Raises:
        SettingsInvalid: It is not one of llama-server.
    """
    found = program_options(words)
    if found is None:
        raise SettingsInvalid(
            f"{words[0] if words else 'nothing'} is not llama-server",
            hint="corral import -- llama-server -m FILE.gguf …, or the file of another program",
        )
    program, rest = found
    options = read_options(rest)
    name = next(iter(options.aliases), None)
    models = tuple(_models(name, options, base))
    notes = () if models else tuple(options.notes) or ("the command names no model (--model)",)
    engine = {"engine": resolved(program, base)} if "/" in program else {}
    return Converted("llama-server command", models, {**engine, **_proxy(options)}, notes)


def _models(name: str | None, options: ModelOptions, base: Path) -> Iterator[ConvertedModel]:
    if options.path is not None:
        name = name or file_names.model_name(Path(options.path).name)
        yield converted_model(name, options, base)


def converted_model(name: str, options: ModelOptions, base: Path, **more: Any) -> ConvertedModel:
    """Make the table of a model whose options name a file."""
    aliases = unique(one for one in (*options.aliases, *more.pop("aliases", ())) if one != name)
    table = {
        "path": resolved(options.path or "", base),
        **({"aliases": list(aliases)} if aliases else {}),
        **more,
        **({"flags": options.flags} if options.flags else {}),
    }
    return ConvertedModel(name, table, (*options.notes, *_context_notes(options)))


def _context_notes(options: ModelOptions) -> Iterator[str]:
    if "ctx-size" in options.flags and "parallel" not in options.flags:
        yield (
            "slots: ctx-size is divided among them, and there are 4 unless flags.parallel says "
            "another number; batching.max_context_length gives each so many tokens"
        )


def _proxy(options: ModelOptions) -> dict[str, Any]:
    if options.host is None and options.port is None:
        return {}
    listen = f"{options.host or _DEFAULT_HOST}:{options.port or _DEFAULT_PORT}"
    return {"proxy": {"listen": listen}}
