"""The types of client programs: facts about the daemon, settings files, and a probe's request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

KEY_VARIABLE: Final = "CORRAL_API_KEY"
# For clients that want a key although the daemon needs none.
NO_KEY: Final = "none"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers chats; `context_tokens` limits one request, None if not known yet."""

    name: str
    context_tokens: int | None = None
    sees_images: bool = False


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

    @property
    def api(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.url}/v1"


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


@dataclass(frozen=True, slots=True)
class ClientProgram:
    name: str
    title: str
    directory: Callable[[Places], Path]  # returns the directory of its settings
    files: Callable[[Facts, Places], Sequence[FileSettings]]  # returns its settings
    run: Callable[[Facts], str]  # returns the command that starts it then, for people
    ca_variable: str  # the variable that names a file of trusted certificates
    programs: tuple[str, ...] = ()  # names of its commands; empty: its own name
    api: Api = "/v1/chat/completions"
    key_variable: str = KEY_VARIABLE  # the variable from which it reads the API key
    writes_ca: bool = False  # whether its settings name that file
    context_least: int = 0  # tokens of its own prompt and some turns; 0 if any context will do


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
