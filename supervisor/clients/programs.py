"""The client programs of `programs.toml`: the settings of each, and a probe's request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from proxy.common.toml_text import table_beside

KEY_VARIABLE: Final = "CORRAL_API_KEY"
# For clients that want a key although the daemon needs none.
NO_KEY: Final = "none"
# The part of the context that an answer may take.
_ANSWER_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers chats; `context_tokens` limits one request, None if not known yet."""

    name: str
    context_tokens: int | None = None
    sees_images: bool = False

    def names(self) -> dict[str, Any]:
        tokens = self.context_tokens or None
        answer = tokens // _ANSWER_SHARE if tokens else None
        return {"id": self.name, "context": tokens, "answer": answer, "images": self.sees_images}


@dataclass(frozen=True, slots=True)
class Facts:
    """The daemon, for clients."""

    url: str  # without a path
    models: tuple[ServedModel, ...]
    model: ServedModel  # for most requests; one of `models`
    small: ServedModel  # for short requests, such as titles
    needs_key: bool = False  # clients read the key from the variable CORRAL_API_KEY
    # PEM file to trust for https if it is self-signed; otherwise None.
    certificate: Path | None = None
    ruled: frozenset[str] = frozenset()  # clients that have prompt rules

    def names(self) -> dict[str, Any]:
        """Return the names of `programs.toml`; None for unknown values."""
        names: dict[str, Any] = {
            "url": self.url,
            "api": f"{self.url}/v1",
            "main": self.model.name,
            "main_context": self.model.context_tokens,
            "small": self.small.name,
            "key": KEY_VARIABLE if self.needs_key else None,
            "no_key": None if self.needs_key else NO_KEY,
            "certificate": str(self.certificate) if self.certificate else None,
        }
        return names | {"models": [names | model.names() for model in self.models]}


@dataclass(frozen=True, slots=True)
class Places:
    """The directories of a user's settings."""

    home: Path
    environ: Mapping[str, str]
    corral: Path  # the directory of corral.toml

    @property
    def config(self) -> Path:
        return self.named("XDG_CONFIG_HOME", self.home / ".config")

    def named(self, variable: str, default: Path) -> Path:
        """Return the directory that a variable names; an empty variable names none."""
        return Path(value) if (value := self.environ.get(variable)) else default


# The name of a table's member, or of a list the object whose member has this value.
Step = str | tuple[str, str]
Place = tuple[Step, ...]
# Stands for a value that is not there.
ABSENT: Final[Any] = object()


def nest_value(place: Place, value: Any) -> Any:
    """Wrap a value in the tables and lists that lead to it."""
    for step in reversed(place):
        value = {step: value} if isinstance(step, str) else [value]
    return value


FileFormat = Literal["json", "toml", "yaml", "env"]  # JSON with comments or without
# The endpoint that a client sends its requests to.
Api = Literal["/v1/messages", "/v1/responses", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Values of one settings file, in order; `defaults` are written only if the file has none."""

    path: Path
    format: FileFormat
    values: Mapping[Place, Any]
    defaults: Mapping[Place, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """A program of `programs.toml`, which explains `directory`, `start` and `file`."""

    name: str
    title: str
    directory: str
    start: str  # the command that starts it then, for people
    file: Sequence[Mapping[str, Any]]
    ca_variable: str  # the variable that names a file of trusted certificates
    variable: str = ""
    programs: Sequence[str] = ()  # names of its commands; empty: its own name
    api: Api = "/v1/chat/completions"
    key_variable: str = KEY_VARIABLE  # the variable from which it reads the API key
    writes_ca: bool = False  # whether its settings name that file
    context_least: int = 0  # tokens of its system prompt and some turns; 0 if any context suffices
    agent: str = ""  # the program that its User-Agent begins with; empty without prompt rules
    prompt_rules: Sequence[str] = ()  # let its sessions share more of their prompts

    def settings_directory(self, places: Places) -> Path:
        names = {"home": places.home, "config": places.config, "corral": places.corral}
        return places.named(self.variable, Path(self.directory.format_map(names)))

    def files(self, facts: Facts, places: Places) -> Sequence[FileSettings]:
        """Return its settings files, without those that would have no values."""
        names, found = facts.names(), []
        for file in self.file:
            paths = [self.settings_directory(places) / name for name in file["path"]]
            path = next(filter(Path.exists, paths), paths[-1])
            rows = [(row[:-1], row[-1]) for row in file.get("values", ())]
            rows += [(table["place"], table["value"]) for table in file.get("table", ())]
            if values := _values(rows, names):
                path = places.named(file.get("variable", ""), path)
                defaults = _values([(row[:-1], row[-1]) for row in file.get("defaults", ())], names)
                found.append(FileSettings(path, file["format"], values, defaults))
        return found

    def run(self, facts: Facts) -> str:
        return self.start.format_map(facts.names())


# An escaped brace is two.
_NAME: Final = re.compile(r"(?<!\{)\{(\w+)(?::d)?\}")


def _values(rows: Iterable[tuple[Any, Any]], names: Mapping[str, Any]) -> dict[Place, Any]:
    """Fill places and values; those whose place names a model's `id`, once for each model."""
    values: dict[Place, Any] = {}
    for place, template in rows:
        for its_names in names["models"] if "{id}" in str(place) else [names]:
            steps = _fill(place, its_names)
            value = _fill(template, its_names)
            if value is not None:
                # The table of a step has one member.
                at = tuple(step if isinstance(step, str) else step.popitem() for step in steps)
                values[at] = value
    return values


def _fill(template: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of a template; None if it is unknown."""
    if isinstance(template, str):
        if any(names[name] is None for name in _NAME.findall(template)):
            return None
        is_value = _NAME.fullmatch(template) and ":" not in template
        return names[template[1:-1]] if is_value else template.format_map(names)
    if isinstance(template, list):
        found = (_fill(part, names) for part in template)
        return [value for value in found if value is not None]
    return _fill_table(template, names) if isinstance(template, dict) else template


def _fill_table(template: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    match template:
        case {"first": parts}:
            return _fill(parts, names)[0]
        case {"needs": name, "then": value}:
            return _fill(value, names) if names[name] else None
        case {"each": part}:
            return [_fill(part, its_names) for its_names in names["models"]]
        case {"by_name": part}:
            return {its_names["id"]: _fill(part, its_names) for its_names in names["models"]}
    filled = ((name, _fill(part, names)) for name, part in template.items())
    return {name: value for name, value in filled if value is not None}


CLIENTS: Final[Sequence[ClientProgram]] = tuple(
    ClientProgram(**program) for program in table_beside(__file__)["program"]
)


_PROMPT: Final = "Say hello."
# The Responses API's minimum is 16.
_MAX_TOKENS: Final = 16
_ENDS: Final[Mapping[Api, Sequence[str]]] = {
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/chat/completions": ("[DONE]",),
}


def body(api: Api, model: str) -> Mapping[str, Any]:
    """Return a short streaming request as the client sends it."""
    messages = [{"role": "user", "content": _PROMPT}]
    if api == "/v1/responses":
        return {
            "model": model,
            "input": [{"type": "message", **messages[0]}],
            "max_output_tokens": _MAX_TOKENS,
            "stream": True,
            "store": False,
        }
    return {"model": model, "messages": messages, "max_tokens": _MAX_TOKENS, "stream": True}


def headers(api: Api) -> Mapping[str, str]:
    return {"anthropic-version": "2023-06-01"} if api == "/v1/messages" else {}


def is_complete(api: Api, stream: str) -> bool:
    """Return whether a stream has an answer's last event."""
    return any(end in stream for end in _ENDS[api])


def self_signed(path: str | None) -> Path | None:
    """Return the certificate if it is self-signed: then clients can trust it alone."""
    if path is None:
        return None
    # Imported here: few daemons have a certificate.
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415

    try:
        found = load_pem_x509_certificates(Path(path).read_bytes())[0]
    except (OSError, ValueError, IndexError):  # the daemon reports it
        return None
    return Path(path) if found.issuer == found.subject else None
