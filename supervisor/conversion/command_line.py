"""Command lines of `llama-server`, alone or in a script, as models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from proxy.config.address import is_loopback
from supervisor.conversion.converted import Converted, ConvertedModel, read_text
from supervisor.conversion.flags import ModelOptions, resolved, unique
from supervisor.conversion.shell import Container, EngineCommand, engine_commands
from supervisor.engines.help import Flags, newest_flags
from supervisor.errors import SettingsInvalid
from supervisor.flags.file_paths import with_paths
from supervisor.hub import file_names, reference
from supervisor.model_stores.references import HUB, is_reference
from supervisor.model_stores.stored_model import model_id
from supervisor.settings.types import is_alias, is_model_name

_SHELL_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]")
_SWAP_PORT: Final = "${PORT}"  # llama-swap chooses it
_DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = "8080"
_KEYLESS: Final = (
    "without an API key every machine that reaches it could use the models; give --api-key KEY "
    "too, or run corral key add NAME, then set listen and api_keys_file under [proxy]"
)


def convert(
    text: str, base: Path, known: Flags | None = None, more_omitted: tuple[str, ...] = ()
) -> Converted:
    """Convert the commands of a text whose relative paths begin at a directory.

    Args:
        known: The options of the engine at hand; unset: those of the newest recorded build.
        more_omitted: What of its source is not taken over besides.

    Raises:
        SettingsInvalid: It does not start llama-server.
    """
    commands = engine_commands(text)
    if not commands:
        raise SettingsInvalid(
            f"{next(iter(text.split()), 'nothing')} is not llama-server",
            hint="corral import -- llama-server -m FILE.gguf …, or the file of another program",
        )
    read = [read_command(command, base, known) for command in commands]
    models = tuple(_numbered(model for one in read if (model := one.model())))
    omitted = [note for one in read if not one.options.source for note in one.omitted]
    found = {} if models else read[0].models_dir()
    if found and (flags := ", ".join(read[0].options.flags)):
        omitted.append(f"{flags}: of all models of a directory; set them for each under [models]")
    if not models and not omitted and not found:
        omitted = ["the command names no model (--model)"]
    first = next((one for one in read if one.options.source), read[0])
    proxy, refused = first.proxy()
    engine = {"engine": first.program} if first.program else {}
    keys = tuple(first.options.keys)
    return Converted(
        "llama-server command",
        models,
        {**engine, **found, **proxy},
        (*more_omitted, *omitted, *refused),
        keys=keys,
    )


def _numbered(models: Iterator[ConvertedModel]) -> Iterator[ConvertedModel]:
    """Give models of the same name numbers."""
    names = set[str]()
    for model in models:
        name, number = model.name, 2
        while name in names:
            name, number = f"{model.name}-{number}", number + 1
        names.add(name)
        yield ConvertedModel(name, model.table, model.omitted, model.notes)


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """A command as options.

    Attributes:
        base: Where its relative paths begin.
        program: The path of the engine; empty if PATH or a container has it.
    """

    options: ModelOptions
    base: Path
    program: str
    container: Container | None = None

    @property
    def omitted(self) -> tuple[str, ...]:
        return tuple(self.options.omitted)

    def model(self, name: str | None = None, **more: Any) -> ConvertedModel | None:
        """Return the model that it serves, under its alias if no name is given."""
        source = self.options.source
        if source is None:
            return None
        aliases = [*more.pop("aliases", ()), *self.options.aliases]
        if is_reference(source):
            aliases.append(source.partition(":")[2])
        name = name or next(iter(self.options.aliases), None) or name_of(source)
        settled = self.options.settled_flags()
        notes = list(self.options.notes)
        if not is_model_name(name):
            wanted, name = name, model_id(name).rstrip("-") or "model"
            aliases.insert(0, wanted)
            notes.append(f"no model can have the name {wanted}; clients call it {name}")
        change = self._resolve(notes)
        flags = with_paths(settled, lambda path: Path(change(str(path))))
        table = {
            "path": change(source),
            **({"aliases": others} if (others := _others(aliases, name)) else {}),
            **more,
            **({"args": self.options.args} if self.options.args else {}),
            **({"flags": flags} if flags else {}),
        }
        notes += _context_notes(self.options)
        return ConvertedModel(name, table, self.omitted, unique(notes))

    def _resolve(self, notes: list[str]) -> Callable[[str], str]:
        """Return a function that makes a path of the command one of this machine."""

        def change(path: str) -> str:
            container = self.container
            if container is None or is_reference(path):
                return resolved(path, self.base)
            here = container.path(path)
            if here is None:
                notes.append(f"{path} is a path in the container; set it to the file here")
                return path
            found = resolved(here, self.base)
            notes.append(f"{path} is a path in the container, and {found} here")
            return found

        return change

    def proxy(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return `[proxy]`, and why its address is another one."""
        known, keys = self.options.words, self.options.keys
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
        table = {**listen, **({"api_keys_file": KEYS_FILE} if keys else {}), **self._tls()}
        return {"proxy": table} if table else {}, tuple(omitted)

    def models_dir(self) -> dict[str, Any]:
        """Return the settings of the router mode: its models are found, and loaded on request."""
        path = self.options.words.get("models-dir")
        here = self.container.path(path) if self.container and path else path
        return {"models_dir": resolved(here, self.base), "serve_found": True} if here else {}

    def _tls(self) -> dict[str, Any]:
        names = {"cert": "ssl-cert-file", "key": "ssl-key-file"}
        paths = {key: self.options.words.get(name) for key, name in names.items()}
        files = {key: resolved(path, self.base) for key, path in paths.items() if path}
        return {"tls": files} if files.keys() == names.keys() else {}


def _others(names: list[str], name: str) -> list[str]:
    return [other for other in unique(names) if other != name and is_alias(other)]


def read_command(command: EngineCommand, base: Path, known: Flags | None = None) -> ReadCommand:
    """Read the options and variables of a command."""
    options = ModelOptions(known or newest_flags())
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
    directory = base / command.directory
    if path := options.words.pop("api-key-file", None):
        _take_key_file(options, path, directory, command.container)
    for word in (*options.words.values(), *map(str, options.flags.values())):
        if _SHELL_VARIABLE.search(word) and word != _SWAP_PORT:
            options.notes.append(f"{word}: a variable of a shell; write its value")
    program = resolved(command.program, directory) if "/" in command.program else ""
    return ReadCommand(options, directory, program, command.container)


def _take_key_file(
    options: ModelOptions, path: str, directory: Path, container: Container | None
) -> None:
    """Take over the API keys of a file, one a line. Source: llama.cpp, common/arg.cpp."""
    here = container.path(path) if container else path
    if here is None:
        options.omitted.append(f"--api-key-file {path}: a path in the container")
        return
    try:
        text = read_text(Path(resolved(here, directory)))
    except SettingsInvalid as error:
        options.omitted.append(f"--api-key-file {path}: {error.message}; corral key add makes keys")
        return
    options.keys += [line for line in text.splitlines() if line]


def name_of(source: str) -> str:
    """Return a name to serve a path or a reference by."""
    if not is_reference(source):
        return file_names.model_name(Path(source).name)
    found = reference.parse(source) if source.startswith(HUB) else None
    if isinstance(found, reference.HubReference):
        last = found.file or f"{found.repo.removesuffix('-GGUF')}.gguf"
        return file_names.model_name(Path(last).name)
    return file_names.model_name(f"{source.partition(':')[2].replace('/', '-')}.gguf")


def _context_notes(options: ModelOptions) -> Iterator[str]:
    if options.flags.get("ctx-size") and "parallel" not in options.flags:
        yield (
            "slots: ctx-size is divided among them, and there are 4 unless flags.parallel says "
            "another number; batching.max_context_length gives each so many tokens"
        )
