"""Converts settings of other programs to `corral.toml`.

`kind_of` recognises the kind of a text, `convert` reads it, and `render` writes TOML. Modelfiles,
router presets and compose files are read here. In a preset of the router mode (`--models-preset
FILE.ini`), sections are models, `[*]` applies to all, and keys are options or LLAMA_ARG_*
variables. Each llama-server service of a compose file is read as the equivalent `docker run`.

Sources: Ollama, docs/modelfile.md; llama.cpp, common/preset.cpp and docs; The Compose
Specification, `services`; docker run --help.
"""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import tomlkit
from tomlkit.items import Comment, Table

from supervisor.builds.help import Flags, newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.models.model_lookup import HUB, OLLAMA
from supervisor.settings import import_flags, import_llama_swap
from supervisor.settings.import_flags import Converted, ConvertedModel, ModelOptions, ReadCommand
from supervisor.settings.import_llama_swap import read_yaml
from supervisor.settings.import_shell import engine_commands

_MODELFILE: Final = "Modelfile"
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


def convert_modelfile(text: str, base: Path, known: Flags | None = None) -> Converted:
    """Convert a Modelfile to a model that is named after its GGUF file.

    Raises:
        SettingsInvalid: The text has no FROM.
    """
    options = ModelOptions(known or newest_flags())
    stops, more = list[str](), dict[str, Any]()
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for found in _INSTRUCTION.finditer(lines):
        word, value = found[1].upper(), (found[2] or found[3] or "").strip()
        key, _, setting = value.partition(" ")
        if word == "PARAMETER" and key == "stop":
            stops.append(setting.strip().strip('"'))
        elif word == "PARAMETER" and key == "num_ctx" and _TOKENS.fullmatch(setting):
            more["batching"] = {"max_context_length": int(setting)}  # num_ctx is per conversation
        elif word == "PARAMETER":
            if flag := _FLAGS.get(key):
                options.take(flag, setting.strip())
            else:
                options.omitted.append(f"no equivalent: PARAMETER {key}")
        else:
            _take(options, word, value)
    if not options.source:
        raise SettingsInvalid("this is not a Modelfile: it has no FROM")
    if stops:
        options.notes.append("stop counts for requests of NAME:ollama, a variant of the model")
        more["variants"] = {"ollama": {"stop": stops}}
    made = ReadCommand(options, base, "").model(**more)
    return Converted(_MODELFILE, (made,) if made else ())


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


def _source(text: str) -> str:
    """Convert the argument of FROM to a path, or to a reference to Hugging Face or Ollama."""
    if text.startswith(("/", ".", "~")) or text.lower().endswith(".gguf"):
        return text
    host, _, rest = text.partition("/")
    return f"{HUB}{rest}" if host in _HUB_HOSTS else f"{OLLAMA}{text}"


_ROUTER_PRESET: Final = "router preset"
_ALL: Final = "*"
_TOP: Final = "\0"  # keys before the first section, such as version
_LOAD: Final = "load-on-startup"
_OF_THE_ROUTER: Final = frozenset({"stop-timeout", "dedup-cache-models"})
_TRUE: Final = frozenset({"1", "true", "on", "enabled"})


def convert_router_preset(text: str, base: Path, known: Flags | None = None) -> Converted:
    """Convert a preset whose relative paths start at `base`; `known` as in `convert`.

    Raises:
        SettingsInvalid: The text is not a preset.
    """
    sections = _read(text)
    shared = sections.get(_ALL, {})
    models, omitted = list[ConvertedModel](), list[str]()
    for name, section in sections.items():
        if name in {_ALL, _TOP}:
            continue
        made = _preset_model(name, {**shared, **section}, base, known or newest_flags())
        if isinstance(made, ConvertedModel):
            models.append(made)
        else:
            omitted.append(made)
    return Converted(_ROUTER_PRESET, tuple(models), {}, tuple(omitted))


def _read(text: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(
        delimiters=("=",), comment_prefixes=("#", ";"), strict=False, default_section="\1"
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    try:
        parser.read_string(f"[{_TOP}]\n{text}")
    except configparser.Error as error:
        first, *_ = str(error).splitlines()
        raise SettingsInvalid(f"this is not an INI file: {first}") from error
    return {name: dict(parser[name]) for name in parser.sections()}


def _preset_model(
    name: str, section: Mapping[str, str], base: Path, known: Flags
) -> ConvertedModel | str:
    """Return a model, or a sentence that says why it was omitted."""
    options, is_preloaded = ModelOptions(known), False
    for key, value in section.items():
        if key == _LOAD:
            is_preloaded = value.lower() in _TRUE
        elif key in _OF_THE_ROUTER:
            options.omitted.append(f"no equivalent: {key}")
        elif not options.take_variable(key, value):
            options.take(key, value)
    if options.source is None:
        options.take("hf-repo", name)  # the name of a section may be a repository
    made = ReadCommand(options, base, "").model(name, preload=is_preloaded)
    return made or f"{name}: {'; '.join(options.omitted) or 'it names no model'}"


_USE: Final = re.compile(r"\$(?:\$|\{(\w+)(?::?-([^{}]*))?\}|(\w+))")


def convert_compose(
    text: str, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> Converted:
    """Convert the services of a compose file; raises SettingsInvalid if none is llama-server."""
    services = read_yaml(text, "a compose file").get("services")
    commands, omitted = list[str](), list[str]()
    for name, service in services.items() if isinstance(services, Mapping) else ():
        words = _words(service, environ) if isinstance(service, Mapping) else []
        line = shlex.join(words)
        if engine_commands(line):
            commands.append(line)
        else:
            omitted.append(f"service {name}: it is not llama-server")
    if not commands:
        raise SettingsInvalid(
            "no service of this compose file is llama-server",
            hint="corral import -- llama-server -m FILE.gguf … takes over a command line",
        )
    return import_flags.convert_commands(
        "\n".join(commands), base, known, more_omitted=tuple(omitted)
    )


def _words(service: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    options = [
        *_each("-v", _joined(service.get("volumes"), ("source", "target"), environ)),
        *_each("-p", _joined(service.get("ports"), ("host_ip", "published", "target"), environ)),
        *_each("-e", _variables(service.get("environment"), environ)),
    ]
    if service.get("network_mode") == "host":
        options += ["--network", "host"]
    started = _split(service.get("entrypoint"), environ)
    inside = [*started, *_split(service.get("command"), environ)]
    return ["docker", "run", *options, _text(service.get("image"), environ) or "image", *inside]


def _each(option: str, values: Iterator[str]) -> Iterator[str]:
    for value in values:
        yield from (option, value)


def _joined(items: object, keys: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield entries in the short form; `keys` are the parts of an entry in the long form."""
    for item in items if isinstance(items, list) else ():
        parts = [item.get(key) for key in keys] if isinstance(item, Mapping) else [item]
        if text := ":".join(_text(part, environ) for part in parts if part is not None):
            yield text


def _variables(given: object, environ: Mapping[str, str]) -> Iterator[str]:
    if isinstance(given, Mapping):
        given = [f"{name}={_text(value, environ)}" for name, value in given.items()]
    for item in given if isinstance(given, list) else ():
        yield _text(item, environ)


def _split(given: object, environ: Mapping[str, str]) -> list[str]:
    if isinstance(given, list):
        return [_text(word, environ) for word in given]
    try:
        return shlex.split(_text(given, environ))
    except ValueError as error:
        raise SettingsInvalid(f"the command cannot be read: {str(error).lower()}") from error


def _text(value: object, environ: Mapping[str, str]) -> str:
    """Expand the variables in a value; unset variables without a default stay."""
    if value is None:
        return ""

    def expand(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name is None:
            return "$"
        return environ.get(name) or (found[0] if found[2] is None else found[2])

    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _USE.sub(expand, text)


SourceKind = Literal["command", "compose", "llama-swap", "router", "modelfile"]
KINDS: Final[tuple[SourceKind, ...]] = get_args(SourceKind)
_SECTION: Final = re.compile(r"^[ \t]*\[[^\]\n]+\][ \t]*$", re.MULTILINE)
_MODELS: Final = re.compile(r"^models[ \t]*:", re.MULTILINE)
_SERVICES: Final = re.compile(r"^services[ \t]*:", re.MULTILINE)
_EXEC_START: Final = re.compile(r"^ExecStart=", re.MULTILINE)
_FROM: Final = re.compile(r"^[ \t]*FROM[ \t]+\S", re.MULTILINE | re.IGNORECASE)


def kind_of(text: str) -> SourceKind:
    """Recognise the kind of a text; raises SettingsInvalid if it is none of `KINDS`."""
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
    """Convert a text whose relative paths start at `base`.

    Args:
        environ: The environment, for variables in the text.
        known: The options of the installed engine; None for those of the newest recorded build.

    Raises:
        SettingsInvalid: The text is not of that kind.
    """
    match kind:
        case "command":
            return import_flags.convert_commands(text, base, known)
        case "compose":
            return convert_compose(text, base, environ, known)
        case "llama-swap":
            return import_llama_swap.convert_llama_swap(text, base, environ, known)
        case "router":
            return convert_router_preset(text, base, known)
        case "modelfile":
            return convert_modelfile(text, base, known)


def render(converted: Converted) -> str:
    """Return the text of `corral.toml`, with omissions and notes in comments."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From a {converted.source}."))
    for comment in _comments(converted.omitted, converted.notes):
        document.add(comment)
    for key, value in _plain_first(converted.tables):
        document.add(key, _item(value))
    models = tomlkit.table(is_super_table=True)
    for model in converted.models:
        models.add(model.name, _table(model.table, _comments(model.omitted, model.notes)))
    if converted.models:
        document.add("models", models)
    return tomlkit.dumps(document)


def _plain_first(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values before tables, as TOML requires."""
    yield from sorted(table.items(), key=lambda item: isinstance(item[1], Mapping))


def _comments(omitted: Iterable[str], notes: Iterable[str]) -> Iterator[Comment]:
    for sentence in omitted:
        yield tomlkit.comment(f"Not taken over: {_line(sentence)}")
    for sentence in notes:
        yield tomlkit.comment(f"Note: {_line(sentence)}")


def _table(values: Mapping[str, Any], comments: Iterable[Comment] = ()) -> Table:
    made = tomlkit.table()
    for comment in comments:
        made.add(comment)
    for key, value in _plain_first(values):
        made.add(key, _item(value))
    return made


def _item(value: Any) -> Any:
    return _table(value) if isinstance(value, Mapping) else value


def _line(text: str) -> str:
    """Return a text on one line, so that it cannot leave its comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
