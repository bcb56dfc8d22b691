"""Finds commands that start llama-server in scripts, systemd units and `docker run` lines.

Variables that the text sets are expanded. Nothing is run, and no file is read.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.errors import SettingsInvalid
from supervisor.system.files import expand_home

_TEXT_MAX: Final = 1024**2
_PROGRAM_NAME: Final = re.compile(r"[\w.-]+")
_SEPARATORS: Final = "\n;"
_OPERATORS: Final = frozenset({"&", "&&", "|", "||"})
_REDIRECTION: Final = re.compile(r"[\d&]?[<>]{1,2}(?:&\d)?([\w./~$-]*)")
_ASSIGNMENT: Final = re.compile(
    r"^[ \t]*(?:export[ \t]+|readonly[ \t]+)?(\w+)="
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|]*)[ \t]*;?(?:[ \t]#.*)?$",
    re.MULTILINE,
)
_USE: Final = re.compile(r"\$(?:\$|\{(\w+)(?::?-([^{}\n]*))?\}|(\w+))")
# A command in a systemd unit, with its possible prefixes. Source: systemd.service(5).
_EXEC_START: Final = re.compile(r"^ExecStart=[-@:+!]*", re.MULTILINE)
_VARIABLE: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_COMMENT_LINE: Final = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# They start another program without effects that llama-corral would have to reproduce.
_TRANSPARENT: Final = frozenset({"exec", "env", "nohup", "command", "export", "time", "setsid"})
_IMAGE: Final = re.compile(r"(?<!o)llama")  # not Ollama's
_CONTAINERS: Final = frozenset({"docker", "podman", "nerdctl"})
# Options of `docker run` without a value. Source: docker run --help.
_BARE: Final = frozenset(
    {"--rm", "--detach", "--interactive", "--tty", "--init", "--privileged", "--read-only"}
    | {"--publish-all", "--quiet", "--no-healthcheck", "--oom-kill-disable", "--sig-proxy"}
)
_BARE_LETTERS: Final = frozenset("ditPq")


@dataclass(frozen=True, slots=True)
class Container:
    """The container of an engine, from the options of `docker run`."""

    image: str
    # Pairs of a directory on this machine and its path in the container.
    volumes: tuple[tuple[str, str], ...] = ()
    # Host and port on this machine, by the port in the container.
    ports: dict[str, tuple[str, str]] = field(default_factory=dict)
    has_own_network: bool = True

    def path(self, path: str) -> str | None:
        """Translate a path of the container to this machine; None if no volume contains it."""
        for here, there in self.volumes:
            if path == there or path.startswith(f"{there.rstrip('/')}/"):
                return here.rstrip("/") + path[len(there.rstrip("/")) :]
        return None


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A command that starts llama-server."""

    program: str  # as written; empty if there are only options, or if it is in a container
    options: tuple[str, ...]  # the words after the program
    # Environment variables set for this command only.
    variables: dict[str, str] = field(default_factory=dict)
    wrapper: str = ""  # words before the program that are not converted, such as `taskset -c 0-7`
    container: Container | None = None
    directory: str = ""  # base of relative paths, relative to the text's directory


def split(text: str) -> list[str]:
    """Split a command as a shell does. Raises SettingsInvalid: a quotation mark is not closed."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise _unreadable_command(error) from error


def engine_commands(text: str) -> tuple[EngineCommand, ...]:
    """Return the commands of a text that start llama-server; raises SettingsInvalid as `split`."""
    found, directory = [], ""
    for words in _commands(_with_variables(_EXEC_START.sub("", text))):
        if words[0] == "cd" and len(words) > 1:
            directory = str(Path(directory) / words[1])
        elif command := engine_command(words, directory):
            found.append(command)
    return tuple(found)


def engine_command(words: Sequence[str], directory: str = "") -> EngineCommand | None:
    """Parse the words of a command; None if it does not start llama-server."""
    variables, wrapper = dict[str, str](), list[str]()
    for index, word in enumerate(words):
        name, rest = Path(word).name, words[index + 1 :]
        if name in _CONTAINERS:
            return _in_container(rest, directory)
        if _is_program(name):
            options = _engine_options(name, rest)
            if options is None:
                return None
            return EngineCommand(word, options, variables, " ".join(wrapper), directory=directory)
        if index == 0 and word.startswith("-"):
            return EngineCommand("", tuple(words), directory=directory)
        if assigned := _VARIABLE.fullmatch(word):
            variables[assigned[1]] = assigned[2]
        elif wrapper or name not in _TRANSPARENT:
            wrapper.append(word)
    return None


def _is_program(name: str) -> bool:
    """Return whether a name may be llama-server's: `llama-server-b10434`, `llama.exe`."""
    if not _PROGRAM_NAME.fullmatch(name):
        return False
    return (
        name.removesuffix(".exe") in {"server", "llama"} or "server" in name.partition("llama")[2]
    )


def _engine_options(name: str, rest: Sequence[str]) -> tuple[str, ...] | None:
    """Return the options after a program; None if `llama` has no `serve` command."""
    if name.removesuffix(".exe") != "llama":
        return tuple(rest)
    return tuple(rest[1:]) if rest[:1] in (["serve"], ["server"]) else None


def _in_container(words: Sequence[str], directory: str) -> EngineCommand | None:
    if "run" not in words:
        return None
    options, rest = _container_options(words[words.index("run") + 1 :])
    image, *inside = rest or [""]
    entrypoint = Path(dict(options).get("--entrypoint", "")).name
    if inside and (started := engine_command(inside)):
        inside = list(started.options)
    elif inside[:1] == ["--server"]:  # of the image `full`
        inside = inside[1:]
    elif not (_IMAGE.search(image) or _is_program(entrypoint)):
        return None
    values = [value for name, value in options if name in {"-e", "--env"}]
    variables = {found[1]: found[2] for value in values if (found := _VARIABLE.fullmatch(value))}
    network = [value for name, value in options if name in {"--network", "--net"}]
    volumes, ports = tuple(_volumes(options)), dict(_ports(options))
    container = Container(image, volumes, ports, has_own_network="host" not in network)
    return EngineCommand("", tuple(inside), variables, container=container, directory=directory)


def _container_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the words of `docker run` into options with values, and the rest from the image on."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        is_bare = name in _BARE or (name[1:2] != "-" and set(name[1:]) <= _BARE_LETTERS)
        if not (equals or is_bare) and rest:
            value = rest.pop(0)
        options.append((name, value))
    return options, rest


def _volumes(options: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in options:
        if name in {"-v", "--volume"}:
            here, there, *_ = [*value.split(":"), ""]
        elif name == "--mount":
            parts = dict(part.partition("=")[::2] for part in value.split(","))
            here = parts.get("source") or parts.get("src", "")
            there = parts.get("target") or parts.get("dst") or parts.get("destination", "")
        else:
            continue
        here = re.sub(r"^\$(?:PWD|\{PWD\}|\(pwd\))", ".", here)
        if here.startswith(("/", ".", "~")) and there.startswith("/"):
            yield str(expand_home(Path(here))), there


def _ports(options: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, value in options:
        if name in {"-p", "--publish"}:
            *address, here, there = ["", *value.removesuffix("/tcp").rsplit(":", 2)][-3:]
            yield there, (address[0] or "0.0.0.0", here)  # noqa: S104 (docker's default)


def expand_variables(text: str, values: Mapping[str, str]) -> str:
    """Expand variables as a shell does; one without a value and a default stays. `$$` is `$`."""

    def expand(found: re.Match[str]) -> str:
        if (name := found[1] or found[3]) is None:
            return "$"
        return values.get(name) or (values.get(name, found[0]) if found[2] is None else found[2])

    return _USE.sub(expand, text)


def _with_variables(text: str) -> str:
    """Expand the variables that lines of the text set; others get their default."""
    values = dict[str, str]()
    parts, at = [], 0
    for found in _ASSIGNMENT.finditer(text := text.replace("\\\n", " ")):
        parts.append(expand_variables(text[at : found.start()], values))
        values[found[1]] = expand_variables(found[2].strip("\"'"), values)
        at = found.end()
        if sum(map(len, (*parts, *values.values()))) > _TEXT_MAX:
            raise SettingsInvalid(f"its variables make more than {_TEXT_MAX >> 20} MiB of text")
    return "".join([*parts, expand_variables(text[at:], values)])


class _Lines(io.StringIO):
    """A text for `shlex` whose comments do not swallow the end of the line."""

    def readline(self, *_limits: int) -> str:  # type: ignore[override] # shlex gives no limit
        line = super().readline()
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def _commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(
        _Lines(_COMMENT_LINE.sub("", text)), posix=True, punctuation_chars=_SEPARATORS
    )
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words, is_target = list[str](), False
    try:
        for word in (*lexer, "\n"):
            if word in _OPERATORS or (word and not word.strip(_SEPARATORS)):
                if words:
                    yield words
                words, is_target = [], False
            elif is_target:
                is_target = False
            elif found := _REDIRECTION.fullmatch(word):
                is_target = not found[1] and "&" not in word[1:]  # the next word is its file
            elif word != "$@":
                words.append(word)
    except ValueError as error:
        raise _unreadable_command(error) from error


def _unreadable_command(error: ValueError) -> SettingsInvalid:
    return SettingsInvalid(f"the command cannot be read: {str(error).lower()}")
