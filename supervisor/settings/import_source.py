"""Converts settings of other programs to `corral.toml`.

`kind_of` recognises the kind of a text, `convert` reads it, and `render` writes TOML. The YAML
settings of llama-swap, Modelfiles, router presets and compose files are read here. In a preset of
the router mode (`--models-preset FILE.ini`), sections are models, `[*]` applies to all, and keys
are options or LLAMA_ARG_* variables. Each llama-server service of a compose file is read as the
equivalent `docker run`.

Macros of llama-swap are `${NAME}` in texts, lists and tables. `${env.X}` is replaced first, then
each macro in turn, the last declared first, so that a macro may use earlier ones. The macros of a
model win over the global macros. `${PORT}` and `${PID}` stay, as they are known only when a model
starts.

Sources: llama-swap, internal/config, internal/config/macros.go and config.example.yaml; Ollama,
docs/modelfile.md; llama.cpp, common/preset.cpp and docs; The Compose Specification, `services`;
docker run --help.
"""

from __future__ import annotations

import configparser
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import tomlkit
from tomlkit.items import Comment, Table

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from proxy.common.toml_text import table_beside
from supervisor.builds.help import Flags, newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.models.model_lookup import HUB, OLLAMA
from supervisor.settings import import_flags, import_groups
from supervisor.settings.import_shell import (
    engine_command,
    engine_commands,
    expand_variables,
    split,
)
from supervisor.settings.import_yaml import expand_text, read_yaml, table_or_empty, texts

_ENVIRONMENT: Final = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_TEXT_MAX: Final = 65_536


def from_environment(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${env.X}`; unknown variables stay."""
    return _ENVIRONMENT.sub(lambda found: environ.get(found[1], found[0]), text)


def expand_macros(value: Any, macros: Mapping[str, object]) -> Any:
    """Replace known macros, last first. Raises SettingsInvalid: above 65,536 characters."""
    if isinstance(value, str):
        return _expanded_text(value, macros)
    if isinstance(value, list):
        return [expand_macros(element, macros) for element in value]
    if isinstance(value, Mapping):
        return {
            expand_macros(key, macros): expand_macros(member, macros)
            for key, member in value.items()
        }
    return value


def _expanded_text(text: str, macros: Mapping[str, object]) -> str:
    for name in reversed(tuple(macros)):
        text = text.replace(f"${{{name}}}", str(macros[name]))
        if len(text) > _TEXT_MAX:
            raise SettingsInvalid(
                f"the macro {name} makes a text longer than {_TEXT_MAX} characters"
            )
    return text


_DEFAULT_LISTEN: Final = "127.0.0.1:8080"
_TABLES: Final = table_beside(__file__)
_LLAMA_SWAP: Final[Mapping[str, Sequence[str]]] = _TABLES["llama_swap"]
_MODELFILE: Final[Mapping[str, Any]] = _TABLES["modelfile"]


def convert_llama_swap(
    text: str, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> import_flags.Converted:
    """Convert settings whose relative paths start at `base`; `known` as in `convert_commands`.

    Raises SettingsInvalid: the text is not YAML, or is not a table.
    """
    whole = read_yaml(from_environment(text, environ))
    made = {
        name: _llama_swap_model(name, table_or_empty(entry), whole, base, known)
        for name, entry in table_or_empty(whole, "models").items()
    }
    models, reasons = _sort_out(made.values())
    names = {name: model.name for name, model in made.items() if not isinstance(model, str)}
    groups, notes = import_groups.convert(whole, names)
    omitted = [*_omitted_keys(whole), *reasons]
    named = texts(whole.get("apiKeys"))
    keys = tuple(key for key in named if key and "${env." not in key)
    if len(keys) < len(named):
        omitted.append("apiKeys: a variable of the environment is not set here")
    tables = {**_tables(whole, has_keys=bool(keys)), **import_flags.given(groups=groups)}
    return import_flags.Converted("llama-swap file", models, tables, (*omitted,), notes, keys)


def _sort_out(
    made: Iterable[import_flags.ConvertedModel | str],
) -> tuple[tuple[import_flags.ConvertedModel, ...], tuple[str, ...]]:
    """Return the models, and the sentences on those that were omitted."""
    found = list(made)
    models = tuple(model for model in found if isinstance(model, import_flags.ConvertedModel))
    return models, tuple(reason for reason in found if isinstance(reason, str))


def _llama_swap_model(
    name: str, entry: Mapping[str, Any], whole: Mapping[str, Any], base: Path, known: Flags | None
) -> import_flags.ConvertedModel | str:
    """Return a model, or a sentence that says why it was omitted."""
    macros = {**_macros(whole), **_macros(entry), "MODEL_ID": name}
    entry = expand_macros({**entry, "macros": None}, macros)
    command = entry.get("cmd")
    started = engine_command(split(command)) if isinstance(command, str) else None
    if started is None:
        return f"{name}: its cmd does not start llama-server"
    assigned = dict(word.partition("=")[::2] for word in texts(entry.get("env")))
    started = replace(started, variables={**assigned, **started.variables})
    read = import_flags.read_command(started, base, known)
    if read.keys:
        read.omitted.append("--api-key: llama-corral gives each engine a random key")
    read.omitted += _model_omitted(entry)
    aliases, engine = texts(entry.get("aliases")), import_flags.given(engine=read.program)
    more = {"aliases": aliases, **engine, **_residency(name, entry, whole)}
    reason = "; ".join(read.omitted) or "its cmd names no model (--model)"
    return read.model(name, **more) or f"{name}: {reason}"


def _residency(name: str, entry: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    ttl_s = _seconds(entry, "ttl", -1)
    if ttl_s == -1:
        ttl_s = _seconds(whole, "globalTTL", 0)
    preloaded = texts(table_or_empty(whole, "hooks", "on_startup").get("preload"))
    return {
        "preload": name in preloaded,
        **import_flags.given(ttl_s=ttl_s, pinned=import_groups.is_pinned(name, whole)),
        **import_flags.given(variants=_variants(name, table_or_empty(entry, "filters"))),
    }


def _variants(name: str, filters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `setParamsByID`, whose keys are NAME:VARIANT, to variants."""
    strip = import_flags.split_list(",".join(texts(filters.get("stripParams"))))
    members = table_or_empty(filters, "setParams")
    found: dict[str, dict[str, Any]] = {
        key.removeprefix(f"{name}:"): {"set": _without_null({**members, **table_or_empty(value)})}
        for key, value in table_or_empty(filters, "setParamsByID").items()
        if key.startswith(f"{name}:")
    }
    for variant in found.values():
        if kept := [name for name in strip if name not in variant["set"]]:
            variant["strip"] = kept
    return found


def _model_omitted(entry: Mapping[str, Any]) -> Iterator[str]:
    filters = table_or_empty(entry, "filters")
    if filters.get("setParams") or filters.get("stripParams"):
        yield (
            "filters change every request of the model; here a variant does, which clients name: "
            "variants.NAME with set and strip"
        )
    by_id = table_or_empty(filters, "setParamsByID")
    if by_id != _without_null(by_id):
        yield "null in setParamsByID: TOML has none"
    yield from import_flags.no_equivalent_notes(
        set(entry).difference(_LLAMA_SWAP["needless"], _LLAMA_SWAP["of_models"])
    )


def _tables(whole: Mapping[str, Any], *, has_keys: bool) -> dict[str, Any]:
    load_timeout_s = _seconds(whole, "healthCheckTimeout", 0)
    nodes = {
        name: _node(expand_macros(table_or_empty(peer), _macros(whole)))
        for name, peer in table_or_empty(whole, "peers").items()
    }
    proxy = {"listen": _DEFAULT_LISTEN, **import_flags.given(api_keys_file=has_keys and KEYS_FILE)}
    return {
        "proxy": proxy,
        **import_flags.given(
            supervisor=import_flags.given(load_timeout_s=load_timeout_s), nodes=nodes
        ),
    }


def _node(peer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "url": "".join(texts(peer.get("proxy"))),
        **import_flags.given(models=texts(peer.get("models"))),
    }


def _omitted_keys(whole: Mapping[str, Any]) -> Iterator[str]:
    for name, peer in table_or_empty(whole, "peers").items():
        if table_or_empty(peer).get("apiKey"):
            yield (
                f"peers.{name}.apiKey: write it into a file of mode 0600, key_file of "
                f"[nodes.{name}]"
            )
    yield from import_flags.no_equivalent_notes(
        set(whole).difference(_LLAMA_SWAP["needless"], _LLAMA_SWAP["global"])
    )


def _macros(table: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: expand_text(value) for name, value in table_or_empty(table, "macros").items()}


def _seconds(table: Mapping[str, Any], key: str, default: int) -> float:
    """Return a number of seconds; raises SettingsInvalid if the value is not a number."""
    value = table.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # a macro gives texts
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise SettingsInvalid(f"{key} is {expand_text(value)[:40]!r}, not a number of seconds")


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [_without_null(element) for element in value if element is not None]
    return value


_INSTRUCTION: Final = re.compile(
    r'^[ \t]*([A-Za-z]+)[ \t]+(?:"""(.*?)"""|([^\n]*))', re.DOTALL | re.MULTILINE
)
_TOKENS: Final = re.compile(r"\s*\d{1,9}\s*")
_HUB_HOSTS: Final = frozenset({"hf.co", "huggingface.co"})


def convert_modelfile(text: str, base: Path, known: Flags | None = None) -> import_flags.Converted:
    """Convert a Modelfile, named after its GGUF file. Raises SettingsInvalid: it has no FROM."""
    options = import_flags.ModelOptions(known or newest_flags(), base)
    stops, more, flags = list[str](), dict[str, Any](), _MODELFILE["flags"]
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for found in _INSTRUCTION.finditer(lines):
        word, value = found[1].upper(), (found[2] or found[3] or "").strip()
        key, _, setting = value.partition(" ")
        if word == "PARAMETER" and key == "stop":
            stops.append(setting.strip().strip('"'))
        elif word == "PARAMETER" and key == "num_ctx" and _TOKENS.fullmatch(setting):
            more["batching"] = {"max_context_length": int(setting)}  # num_ctx is per conversation
        elif word == "PARAMETER":
            if key in flags or key in _MODELFILE["same_flags"]:
                options.take(flags.get(key, key.replace("_", "-")), setting.strip())
            else:
                options.omitted.append(f"no equivalent: PARAMETER {key}")
        else:
            _take(options, word, value)
    if not options.source:
        raise SettingsInvalid("this is not a Modelfile: it has no FROM")
    if stops:
        options.notes.append("stop counts for requests of NAME:ollama, a variant of the model")
        more["variants"] = {"ollama": {"stop": stops}}
    made = options.model(**more)
    return import_flags.Converted("Modelfile", (made,) if made else ())


def _take(options: import_flags.ModelOptions, word: str, value: str) -> None:
    if word == "FROM":
        options.take("model", _source(value))
    elif word == "ADAPTER":
        options.take("--lora", value)
    elif word != "LICENSE":
        options.omitted.append(f"{word}: {_MODELFILE['reasons'].get(word, 'no equivalent')}")


def _source(text: str) -> str:
    """Convert the argument of FROM to a path, or to a reference to Hugging Face or Ollama."""
    if text.startswith(("/", ".", "~")) or text.lower().endswith(".gguf"):
        return text
    host, _, rest = text.partition("/")
    return f"{HUB}{rest}" if host in _HUB_HOSTS else f"{OLLAMA}{text}"


_ALL: Final = "*"
_TOP: Final = "\0"  # keys before the first section, such as version
_LOAD: Final = "load-on-startup"
_OF_THE_ROUTER: Final = frozenset({"stop-timeout", "dedup-cache-models"})


def convert_router_preset(
    text: str, base: Path, known: Flags | None = None
) -> import_flags.Converted:
    """Convert a preset; paths start at `base`. Raises SettingsInvalid: the text is not a preset."""
    sections = _read(text)
    shared = sections.get(_ALL, {})
    models, omitted = _sort_out(
        _preset_model(name, {**shared, **section}, base, known or newest_flags())
        for name, section in sections.items()
        if name not in {_ALL, _TOP}
    )
    return import_flags.Converted("router preset", models, {}, omitted)


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
) -> import_flags.ConvertedModel | str:
    """Return a model, or a sentence that says why it was omitted."""
    options, is_preloaded = import_flags.ModelOptions(known, base), False
    for key, value in section.items():
        if key == _LOAD:
            is_preloaded = value.lower() in import_flags.TRUE
        elif key in _OF_THE_ROUTER:
            options.omitted.append(f"no equivalent: {key}")
        elif not options.take_variable(key, value):
            options.take(key, value)
    if options.source is None:
        options.take("hf-repo", name)  # the name of a section may be a repository
    made = options.model(name, preload=is_preloaded)
    return made or f"{name}: {'; '.join(options.omitted) or 'it names no model'}"


def convert_compose(
    text: str, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> import_flags.Converted:
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


def _variables(written: object, environ: Mapping[str, str]) -> Iterator[str]:
    if isinstance(written, Mapping):
        written = [f"{name}={_text(value, environ)}" for name, value in written.items()]
    for item in written if isinstance(written, list) else ():
        yield _text(item, environ)


def _split(written: object, environ: Mapping[str, str]) -> list[str]:
    if isinstance(written, list):
        return [_text(word, environ) for word in written]
    return split(_text(written, environ))


def _text(value: object, environ: Mapping[str, str]) -> str:
    return expand_variables(expand_text(value), environ)


SourceKind = Literal["command", "compose", "llama-swap", "router", "modelfile"]
KINDS: Final[tuple[SourceKind, ...]] = get_args(SourceKind)
# Marks of each kind of text, in the order in which to look; INI values may begin with FROM.
_SIGNS: Final[tuple[tuple[SourceKind, str], ...]] = (
    ("command", r"^ExecStart="),
    ("llama-swap", r"^models[ \t]*:"),
    ("compose", r"^services[ \t]*:"),
    ("router", r"^[ \t]*\[[^\]\n]+\][ \t]*$"),
    ("modelfile", r"^[ \t]*(?i:FROM)[ \t]+\S"),
    ("command", "llama"),
)


def kind_of(text: str) -> SourceKind:
    """Recognise the kind of a text; raises SettingsInvalid if it is none of `KINDS`."""
    for kind, sign in _SIGNS:
        if re.search(sign, text, re.MULTILINE):
            return kind
    raise SettingsInvalid(
        "this is not a llama-server command, compose file, llama-swap YAML, router preset or "
        "Modelfile",
        hint=f"--from says what it is: {', '.join(KINDS)}",
    )


def convert(
    text: str, kind: SourceKind, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> import_flags.Converted:
    """Convert a text whose relative paths start at `base`; `environ` has the text's variables.

    `known` as in `convert_commands`. Raises SettingsInvalid: the text is not of that kind.
    """
    match kind:
        case "command":
            return import_flags.convert_commands(text, base, known)
        case "compose":
            return convert_compose(text, base, environ, known)
        case "llama-swap":
            return convert_llama_swap(text, base, environ, known)
        case "router":
            return convert_router_preset(text, base, known)
        case "modelfile":
            return convert_modelfile(text, base, known)


def render(converted: import_flags.Converted) -> str:
    """Return the text of `corral.toml`, with omissions and notes in comments."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From a {converted.source}."))
    for comment in _comments(converted.omitted, converted.notes):
        document.add(comment)
    for key, value in _plain_first(converted.tables):
        document.add(key, value)
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


def _table(values: Mapping[str, Any], comments: Iterable[Comment]) -> Table:
    made = tomlkit.table()
    for comment in comments:
        made.add(comment)
    for key, value in _plain_first(values):
        made.add(key, value)
    return made


def _line(text: str) -> str:
    """Return a text on one line, so that it cannot leave its comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
