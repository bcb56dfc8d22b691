"""One client program: where its settings are, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from supervisor.connect.facts import Facts, Places
from supervisor.connect.place import Place


class FileFormat(Enum):
    """The format of a settings file."""

    JSON = "json"  # with comments or without
    TOML = "toml"
    YAML = "yaml"
    ENV = "env"


class Api(Enum):
    """The endpoint that a client sends its requests to."""

    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Values of one settings file.

    Attributes:
        values: Those that are set, in order.
        defaults: Those that are set only where the file has none.
    """

    path: Path
    format: FileFormat
    values: Mapping[Place, Any]
    defaults: Mapping[Place, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Client:
    """A client program.

    Attributes:
        programs: Names of its commands.
        directory: Where its settings are.
        files: Returns its settings.
        run: How it is started then, for people.
        key_variable: The variable in which it looks for the API key.
        ca_variable: The variable that names a file of certificates which it trusts.
        writes_ca: Whether its settings hold that.
        context_least: Tokens that its own prompt and some turns take; 0 if any context will do.
    """

    name: str
    title: str
    programs: tuple[str, ...]
    api: Api
    directory: Callable[[Places], Path]
    files: Callable[[Facts, Places], Sequence[FileSettings]]
    run: Callable[[Facts], str]
    key_variable: str
    ca_variable: str
    writes_ca: bool = False
    context_least: int = 0
