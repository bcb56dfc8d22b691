"""Converts command lines of llama-server to models of `corral.toml`.

Each option becomes a flag or another key of a model. It is looked up in the help of the installed
engine, then in the recorded builds, the newest first, because a command line may have been written
for any build.

Source: llama.cpp, common/arg.cpp: if an option is given twice, the last value counts, unless the
option collects values; a variable LLAMA_ARG_X counts if its option is not given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from proxy.common.toml_text import table_beside
from proxy.common.toml_types import is_loopback
from supervisor.builds.help import Flag, Flags, FlagValue, newest_flags, plain_name, recorded_flag
from supervisor.errors import NoSuchModel, SettingsInvalid
from supervisor.models import file_names, reference
from supervisor.models.model_lookup import HUB, is_reference
from supervisor.models.stored_model import model_id
from supervisor.plan.loras import with_paths
from supervisor.plan.render import canonical, render
from supervisor.plan.setting import ONCE_BARE
from supervisor.settings.import_shell import Container, EngineCommand, engine_commands
from supervisor.settings.tables import is_alias, is_model_name
from supervisor.system.files import expand_home
from supervisor.system.toml_file import read_limited


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    name: str
    table: Mapping[str, Any]  # the keys of `[models.NAME]`
    omitted: tuple[str, ...] = ()  # sentences that name each omitted setting and the reason
    notes: tuple[str, ...] = ()  # remarks on converted settings, one sentence each


@dataclass(frozen=True, slots=True)
class Converted:
    source: str  # the kind of the source, for people: `llama-swap file`
    models: tuple[ConvertedModel, ...]
    tables: Mapping[str, Any] = field(default_factory=dict)  # other tables of `corral.toml` by name
    # Both as of a model, but about no single converted model.
    omitted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)  # the API keys of the clients

    def document(self) -> dict[str, Any]:
        models = {model.name: dict(model.table) for model in self.models}
        return {**self.tables, **({"models": models} if models else {})}


def read_text(path: Path) -> str:
    """Read a settings file. Raises SettingsInvalid: it is unreadable, above 1 MiB, or not UTF-8."""
    try:
        return read_limited(path).decode()
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not text in UTF-8") from error


def no_equivalent_notes(names: Iterable[object]) -> tuple[str, ...]:
    """Return a sentence about a source's keys that have no equivalent; empty without keys."""
    found = ", ".join(sorted(map(str, names)))
    return (f"no equivalent: {found}",) if found else ()


Option = tuple[str, str | None]

_COLLECTED: Final = frozenset(
    {"lora", "lora-scaled", "override-kv", "override-tensor", "spec-draft-override-tensor"}
    | {"control-vector", "control-vector-scaled"}
)
# These collect values too, but have no separator, so all values after the first go to `args`.
_REPEATED: Final = frozenset({"dry-sequence-breaker", "logit-bias"})
TRUE: Final = frozenset({"1", "true", "on", "enabled"})
_FALSE: Final = frozenset({"0", "false", "off", "disabled"})
_SWITCH_WORDS: Final = TRUE | _FALSE | {"auto"}
# TOML has integers of 64 bits.
_NUMBER: Final = re.compile(
    r"[+-]?(?:\d{1,18}|\d{0,15}\.\d{1,15})(?:e[+-]?\d{1,2})?", re.IGNORECASE
)
_SECONDS: Final = re.compile(r"[0-9]{1,7}")  # up to what ttl_s takes
_TABLES: Final = table_beside(__file__)
_WORDS: Final = frozenset[str](_TABLES["words"])
_SECRET: Final = re.compile(r"key|token|secret|password", re.IGNORECASE)
_DOWNLOADS: Final[Mapping[str, str]] = _TABLES["downloads"]
_PRESETS: Final[Mapping[str, str]] = _TABLES["presets"]


@dataclass
class ModelOptions:
    """The settings in an engine's options."""

    known: Flags = field(default_factory=newest_flags)  # the options of the installed engine
    base: Path = Path()  # the base of relative paths
    program: str = ""  # the path of the engine; empty if it is on PATH or in a container
    container: Container | None = None
    # Values for the model's place and the listening address, by the option's long name.
    words: dict[str, str] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list, repr=False)  # the API keys that clients need
    flags: dict[str, FlagValue] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    # Both as in `ConvertedModel`.
    omitted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def source(self) -> str | None:
        """The model: a path, or a reference such as `hf:OWNER/NAME:QUANT`."""
        path, repository, file = map(self.words.get, ("model", "hf-repo", "hf-file"))
        if path or not repository:
            return path or None
        return f"{HUB}{repository.partition(':')[0]}:{file}" if file else f"{HUB}{repository}"

    @property
    def draft(self) -> str | None:
        """The draft model by its reference; a path is the flag `spec-draft-model`."""
        repository = self.words.get("spec-draft-hf")
        return f"{HUB}{repository}" if repository else None

    @property
    def _ttl_s(self) -> int | None:
        """The idle time after which its engine sleeps; None if it does not."""
        word = self.words.get("sleep-idle-seconds", "")
        return int(word) or None if _SECONDS.fullmatch(word) else None

    def read(self, words: Sequence[str]) -> None:
        for name, value in self._options(words):
            if name.startswith("-"):
                self.take(name, value)
            else:
                self.omitted.append(f"{name}: not an option")

    def take(self, name: str, value: str | None) -> None:
        """Convert an option of any build, with or without its dashes."""
        flag = self._find(name)
        match key := flag.key if flag else plain_name(name):
            case _ if key in _WORDS:
                self.words[key] = value or ""
            case "hf-repo" | "spec-draft-hf":
                self._take_repository(key, name, value or "")
            case "model-url":
                self._take_url(value or "")
            case "alias":
                self.aliases += split_list(value or "")
            case "api-key":
                self.keys += split_list(value or "")
            case _ if key in _PRESETS:
                self.read(_PRESETS[key].split())
            case _:
                self._take_flag(name, key, value)

    def take_variable(self, name: str, value: str) -> bool:
        """Convert a variable such as LLAMA_ARG_CTX_SIZE; return whether an option has it."""
        positive = name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)
        options = (*self.known.entries, *newest_flags().entries)
        for wanted in (name, positive):
            option = next((option for option in options if option.env == wanted), None)
            if option and (wanted == name or option.hint is None):
                self.take(option.key if wanted == name else f"no-{option.key}", value)
                return True
        return False

    def _take_repository(self, key: str, name: str, value: str) -> None:
        try:
            found = reference.parse_reference(value)
        except NoSuchModel as error:
            self.omitted.append(f"{name} {value}: {error.message}")
            return
        if isinstance(found, reference.HubReference):
            self.words[key] = str(found)

    def _take_url(self, url: str) -> None:
        """Convert the URL of a model; a file of Hugging Face becomes a reference."""
        with suppress(NoSuchModel):
            found = reference.parse_reference(url)
            if isinstance(found, reference.HubReference):
                self.words["hf-repo"] = str(found)
                return
        shown = reference.without_secrets(url)
        self.omitted.append(f"model-url: corral model get {shown} downloads it; then set path")

    def _take_flag(self, name: str, key: str, value: str | None) -> None:
        reason = _DOWNLOADS.get(key)
        if reason is None and not self._find(name):
            reason = "no known build of llama-server has it"
        try:
            if reason is None:
                key, typed = canonical(name, self._parse_value(name, value), self.known)
                render({key: typed}, self.known)
                self._set(key, typed)
        except SettingsInvalid as error:
            reason = error.message.partition(": ")[2] or error.message
        if reason is not None:
            shown = name if value is None or _SECRET.search(name) else f"{name} {value}"
            self.omitted.append(f"{shown}: {reason}")

    def settled_flags(self) -> dict[str, FlagValue]:
        """Return the flags once all options are read, and note those that the engine lacks."""
        found = {self._ngram_option(key): value for key, value in self.flags.items()}
        _, omitted = render(found, self.known)
        self.notes += [f"{key} = {value}: {reason}" for key, value, reason in omitted]
        return found

    def _ngram_option(self, key: str) -> str:
        """Return the newer option for one kind of n-gram drafting if `key` is for all kinds.

        Source: llama.cpp, common/arg.cpp, the help of removed options.
        """
        kind, mod = self.flags.get("spec-type"), "ngram-mod"
        limit = key.removeprefix("spec-draft-") if kind == mod else ""
        drafts = "spec-draft-model" in self.flags or self.draft is not None
        if limit in {"n-max", "n-min"} and not drafts:
            newer = f"spec-{mod}-{limit}"
        elif kind == mod and key == "spec-ngram-size-n":
            newer = f"spec-{mod}-n-match"
        else:
            newer = key.replace("spec-ngram-", f"spec-{kind}-", 1)
        return newer if self.known.find(newer) else key

    def _set(self, key: str, value: FlagValue) -> None:
        present = self.flags.get(key)
        if key == "load-mode" and {present, value} == {"mmap+mlock", "none"}:
            value = "mlock"  # --mlock and --no-mmap together
        elif present is not None and key in _COLLECTED:
            value = f"{present},{value}"
        elif present is not None and key in _REPEATED:
            self.args += [f"--{key}", str(value)]
            return
        self.flags[key] = value

    def _options(self, words: Sequence[str]) -> Iterator[Option]:
        at = 0
        while at < len(words):
            name, equals, value = words[at].partition("=")
            at += 1
            if equals and name.startswith("-") and self._find(name):
                yield name, value
                continue
            word, count = words[at - 1], self._value_count(words[at - 1], words[at:])
            values, at = words[at : at + count], min(at + count, len(words))
            if count > 1 and not word.endswith("-scaled"):
                self.args += [word, *values]
            else:
                yield word, ":".join(values) if values else None

    def _value_count(self, word: str, rest: Sequence[str]) -> int:
        flag = self._find(word) if word.startswith("-") else None
        if flag is None or flag.kind == "unknown":
            is_value = rest and not (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0]))
            return int(word.startswith("-") and bool(is_value))
        if flag.key in ONCE_BARE:
            is_value = bool(rest) and (rest[0].lower() in _SWITCH_WORDS or rest[0][:1] == "$")
            return int(is_value)
        if flag.key.endswith("-scaled") and len(rest) > 1 and ":" not in rest[0]:
            return 1 + bool(_NUMBER.fullmatch(rest[1]))  # FILE SCALE, the syntax of older builds
        return flag.value_count

    def _find(self, name: str) -> Flag | None:
        return self.known.find(name) or recorded_flag(name)

    def _parse_value(self, name: str, value: str | None) -> FlagValue:
        """Return a value in the form of settings: a number, a word, or true for a bare option."""
        flag = self._find(name)
        if value is None:
            return "on" if flag and flag.key in ONCE_BARE else True
        word, is_switch = value.lower(), flag is not None and flag.hint is None
        if word in TRUE | _FALSE and (is_switch or (flag and {"on", "off"} <= {*flag.choices})):
            return word in TRUE if is_switch else ("on" if word in TRUE else "off")
        if _NUMBER.fullmatch(value) and not (flag and flag.kind in {"path", "string", "list"}):
            return int(value) if value.lstrip("+-").isdecimal() else float(value)
        return value

    def model(self, name: str | None = None, **more: Any) -> ConvertedModel | None:
        """Return the model that the command serves, named by its alias unless `name` is given."""
        source = self.source
        if source is None:
            return None
        aliases = [*more.pop("aliases", ()), *self.aliases]
        if is_reference(source):
            aliases.append(source.partition(":")[2])
        name = name or next(iter(self.aliases), None) or name_of(source)
        settled = self.settled_flags()
        notes = list(self.notes)
        if not is_model_name(name):
            wanted, name = name, model_id(name).rstrip("-") or "model"
            aliases.insert(0, wanted)
            notes.append(f"no model can have the name {wanted}; clients call it {name}")
        flags = with_paths(settled, lambda path: Path(self._path_here(str(path), notes)))
        others = [other for other in unique(aliases) if other != name and is_alias(other)]
        path = self._path_here(source, notes)
        own = given(draft=self.draft, aliases=others, ttl_s=self._ttl_s)
        table = {"path": path, **own, **more, **given(args=self.args, flags=flags)}
        if self.flags.get("ctx-size") and "parallel" not in self.flags:
            notes.append(
                "slots: ctx-size is divided among them, and there are 4 unless flags.parallel says "
                "another number; batching.max_context_length gives each so many tokens"
            )
        return ConvertedModel(name, table, tuple(self.omitted), unique(notes))

    def _path_here(self, path: str, notes: list[str]) -> str:
        container = self.container
        if container is None or is_reference(path):
            return resolve_source_path(path, self.base)
        here = container.path(path)
        if here is None:
            notes.append(f"{path} is a path in the container; set it to the file here")
            return path
        found = resolve_source_path(here, self.base)
        notes.append(f"{path} is a path in the container, and {found} here")
        return found

    def proxy(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the table `[proxy]`, and sentences that say why its address differs."""
        known, keys = self.words, self.keys
        words = {name: word for name, word in known.items() if not _SHELL_VARIABLE.search(word)}
        host, port = words.get("host"), words.get("port")
        if self.container and self.container.has_own_network:
            inside = port or _DEFAULT_PORT
            host, port = self.container.ports.get(inside, (None, port))
        wanted, omitted = host or _DEFAULT_HOST, list[str]()
        if wanted.endswith(".sock"):
            omitted.append(f"--host {wanted}: the proxy listens on HOST:PORT")
            wanted = _DEFAULT_HOST
        elif not is_loopback(wanted) and not keys:
            omitted.append(f"listening on {wanted}: {_KEYLESS}")
            wanted = _DEFAULT_HOST
        shown = f"[{wanted}]" if ":" in wanted else wanted
        listen = {"listen": f"{shown}:{port or _DEFAULT_PORT}"} if host or port else {}
        table = {**listen, **given(api_keys_file=keys and KEYS_FILE), **self._tls()}
        return given(proxy=table), tuple(omitted)

    def models_dir(self) -> dict[str, Any]:
        """Return the settings for the router mode, whose models are found and loaded on request."""
        path = self.words.get("models-dir")
        here = self.container.path(path) if self.container and path else path
        if not here:
            return {}
        return {"models_dir": resolve_source_path(here, self.base), "serve_found": True}

    def _tls(self) -> dict[str, Any]:
        names = {"cert": "ssl-cert-file", "key": "ssl-key-file"}
        paths = {key: self.words.get(name) for key, name in names.items()}
        files = {key: resolve_source_path(path, self.base) for key, path in paths.items() if path}
        return given(tls=files.keys() == names.keys() and files)


def given(**members: Any) -> dict[str, Any]:
    """Return the members that have a value."""
    return {name: value for name, value in members.items() if value}


def split_list(text: str) -> list[str]:
    return [part for word in text.split(",") if (part := word.strip())]


def resolve_source_path(path: str, base: Path) -> str:
    """Join a relative path of a source to the source's directory; references stay."""
    return path if is_reference(path) else str(base / expand_home(Path(path)))


def unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


_SHELL_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]")
_SWAP_PORT: Final = "${PORT}"  # llama-swap chooses it
_DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = "8080"
_KEYLESS: Final = (
    "without an API key every machine that reaches it could use the models; give --api-key KEY "
    "too, or run corral key add NAME, then set listen and api_keys_file under [proxy]"
)


def convert_commands(
    text: str, base: Path, known: Flags | None = None, more_omitted: tuple[str, ...] = ()
) -> Converted:
    """Convert the commands of a text whose relative paths start at `base`.

    `known` are the options of the installed engine, by default those of the newest recorded build;
    `more_omitted` are sentences about other omitted parts. Raises SettingsInvalid: no llama-server.
    """
    commands = engine_commands(text)
    if not commands:
        raise SettingsInvalid(
            f"{next(iter(text.split()), 'nothing')} is not llama-server",
            hint="corral import -- llama-server -m FILE.gguf …, or the file of another program",
        )
    read = [read_command(command, base, known) for command in commands]
    models = tuple(_number_names(model for command in read if (model := command.model())))
    omitted = [note for command in read if not command.source for note in command.omitted]
    found = {} if models else read[0].models_dir()
    if found and (flags := ", ".join(read[0].flags)):
        omitted.append(f"{flags}: of all models of a directory; set them for each under [models]")
    if not models and not omitted and not found:
        omitted = ["the command names no model (--model)"]
    first = next((command for command in read if command.source), read[0])
    proxy, refused = first.proxy()
    tables = {**given(engine=first.program), **found, **proxy}
    omitted = [*more_omitted, *omitted, *refused]
    keys = tuple(first.keys)
    return Converted("llama-server command", models, tables, tuple(omitted), keys=keys)


def _number_names(models: Iterator[ConvertedModel]) -> Iterator[ConvertedModel]:
    names = set[str]()
    for model in models:
        name, number = model.name, 2
        while name in names:
            name, number = f"{model.name}-{number}", number + 1
        names.add(name)
        yield replace(model, name=name)


def read_command(command: EngineCommand, base: Path, known: Flags | None = None) -> ModelOptions:
    directory = base / command.directory
    program = resolve_source_path(command.program, directory) if "/" in command.program else ""
    options = ModelOptions(known or newest_flags(), directory, program, command.container)
    for name, value in command.variables.items():
        if not options.take_variable(name, value):
            options.omitted.append(f"{name}: variables are not set for one model")
    options.read(command.options)
    if command.wrapper:
        options.omitted.append(f"{command.wrapper}: llama-corral starts engines itself")
    if command.container:
        options.notes.append(
            f"the engine of this machine serves it, not the image {command.container.image}"
        )
    if path := options.words.pop("api-key-file", None):
        _take_key_file(options, path)
    for word in (*options.words.values(), *map(str, options.flags.values())):
        if _SHELL_VARIABLE.search(word) and word != _SWAP_PORT:
            options.notes.append(f"{word}: a variable of a shell; write its value")
    return options


def _take_key_file(options: ModelOptions, path: str) -> None:
    """Read the API keys of a file, one per line. Source: llama.cpp, common/arg.cpp."""
    here = options.container.path(path) if options.container else path
    if here is None:
        options.omitted.append(f"--api-key-file {path}: a path in the container")
        return
    try:
        text = read_text(Path(resolve_source_path(here, options.base)))
    except SettingsInvalid as error:
        options.omitted.append(f"--api-key-file {path}: {error.message}; corral key add makes keys")
        return
    options.keys += [line for line in text.splitlines() if line]


def name_of(source: str) -> str:
    if not is_reference(source):
        return file_names.model_name(Path(source).name)
    found = reference.parse_reference(source) if source.startswith(HUB) else None
    if isinstance(found, reference.HubReference):
        last = found.file or f"{found.repo.removesuffix('-GGUF')}.gguf"
        return file_names.model_name(Path(last).name)
    return file_names.model_name(f"{source.partition(':')[2].replace('/', '-')}.gguf")
