"""A Modelfile of Ollama.

Source: Ollama, docs/modelfile.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisor.conversion.command_line import ReadCommand
from supervisor.conversion.converted import Converted
from supervisor.conversion.flags import ModelOptions
from supervisor.engines.help import Flags, newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.model_stores.references import HUB, OLLAMA

_NAME: Final = "Modelfile"
_INSTRUCTION: Final = re.compile(
    r'^[ \t]*([A-Za-z]+)[ \t]+(?:"""(.*?)"""|([^\n]*))', re.DOTALL | re.MULTILINE
)
_TOKENS: Final = re.compile(r"\s*\d{1,9}\s*")
_HUB_HOSTS: Final = frozenset({"hf.co", "huggingface.co"})
_FLAGS: Final = MappingProxyType(
    {
        "num_gpu": "gpu-layers",
        "num_thread": "threads",
        "num_batch": "batch-size",
        "num_keep": "keep",
        "use_mmap": "mmap",
        "num_predict": "predict",
        "temperature": "temperature",
        "top_k": "top-k",
        "top_p": "top-p",
        "min_p": "min-p",
        "typical_p": "typical-p",
        "repeat_last_n": "repeat-last-n",
        "repeat_penalty": "repeat-penalty",
        "presence_penalty": "presence-penalty",
        "frequency_penalty": "frequency-penalty",
        "mirostat": "mirostat",
        "mirostat_tau": "mirostat-ent",
        "mirostat_eta": "mirostat-lr",
        "seed": "seed",
    }
)


def convert(text: str, base: Path, known: Flags | None = None) -> Converted:
    """Convert a Modelfile; its model gets the name of its file. Raises SettingsInvalid."""
    options = ModelOptions(known or newest_flags())
    stops, more = list[str](), dict[str, Any]()
    for word, value in _instructions(text):
        key, _, setting = value.partition(" ")
        if word == "PARAMETER" and key == "stop":
            stops.append(setting.strip().strip('"'))
        elif word == "PARAMETER" and key == "num_ctx" and _TOKENS.fullmatch(setting):
            more["batching"] = {"max_context_length": int(setting)}  # of one conversation, there
        elif word == "PARAMETER":
            _take_parameter(options, key, setting.strip())
        else:
            _take(options, word, value)
    if not options.source:
        raise SettingsInvalid("this is not a Modelfile: it has no FROM")
    if stops:
        options.notes.append("stop counts for requests of NAME:ollama, a variant of the model")
        more["variants"] = {"ollama": {"stop": stops}}
    made = ReadCommand(options, base, "").model(**more)
    return Converted(_NAME, (made,) if made else ())


def _take(options: ModelOptions, word: str, value: str) -> None:
    if word == "FROM":
        options.take("model", _source(value))
    elif word == "ADAPTER":
        options.take("--lora", value)
    elif word != "LICENSE":
        options.omitted.append(f"{word}: {_REASONS.get(word, 'no equivalent')}")


_REASONS: Final = MappingProxyType(
    {
        "SYSTEM": "clients send their system prompt themselves",
        "TEMPLATE": "the chat template of the GGUF counts; another one: flags.chat-template-file",
        "MESSAGE": "clients send the conversation themselves",
    }
)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for found in _INSTRUCTION.finditer(lines):
        word, value = found[1].upper(), (found[2] or found[3] or "").strip()
        yield word, value


def _take_parameter(options: ModelOptions, key: str, value: str) -> None:
    if flag := _FLAGS.get(key):
        options.take(flag, value)
    else:
        options.omitted.append(f"no equivalent: PARAMETER {key}")


def _source(text: str) -> str:
    """Return the path of a file, or the reference to a model of Hugging Face or Ollama."""
    if text.startswith(("/", ".", "~")) or text.lower().endswith(".gguf"):
        return text
    host, _, rest = text.partition("/")
    return f"{HUB}{rest}" if host in _HUB_HOSTS else f"{OLLAMA}{text}"
