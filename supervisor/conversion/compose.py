"""A compose file: its services of llama-server, each as the `docker run` that it stands for.

Source: the Compose Specification, `services`; docker run --help.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from supervisor.conversion import command_line
from supervisor.conversion.converted import Converted
from supervisor.conversion.llama_swap import read_yaml
from supervisor.conversion.shell import engine_commands
from supervisor.engines.help import Flags
from supervisor.errors import SettingsInvalid

_USE: Final = re.compile(r"\$(?:\$|\{(\w+)(?::?-([^{}]*))?\}|(\w+))")


def convert(
    text: str, base: Path, environ: Mapping[str, str], known: Flags | None = None
) -> Converted:
    """Convert the services of a file; raises SettingsInvalid if none is llama-server."""
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
    return command_line.convert("\n".join(commands), base, known, more_omitted=tuple(omitted))


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
    """Yield entries of the short form; those of the long form are a table with these keys."""
    for item in items if isinstance(items, list) else ():
        parts = [item.get(key) for key in keys] if isinstance(item, Mapping) else [item]
        if text := ":".join(_text(part, environ) for part in parts if part is not None):
            yield text


def _variables(given: object, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield NAME=VALUE of a list or a table."""
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
    """Return a value with its variables replaced; one that is not set stays."""
    if value is None:
        return ""

    def replaced(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name is None:
            return "$"
        return environ.get(name) or (found[0] if found[2] is None else found[2])

    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _USE.sub(replaced, text)
