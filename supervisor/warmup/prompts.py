"""Prompts to prefill, so that the first request that uses them is fast.

A `.json` file is a chat request as a client would send it, of which the parts that form the prompt
are used; any other file is the text of a system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisor.errors import SettingsInvalid
from supervisor.host.files import open_regular

SIZE_MAX_BYTES: Final = 1024**2
# Members that shape the response, not the prompt, or that only the proxy may set.
_DROPPED: Final = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "id_slot"}
)
# Some templates reject a prompt without a user message.
_USER_MESSAGE: Final = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A prompt to prefill: its file's name, and a chat request."""

    name: str
    body: Mapping[str, Any] = field(repr=False)


def read(path: Path) -> WarmPrompt:
    """Read a prompt file.

    Raises:
        SettingsInvalid: Missing, too large, or not a prompt.
    """
    try:
        with open_regular(path) as file:
            content = file.read(SIZE_MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise SettingsInvalid(
            f"cannot read the prompt {path}: {error.strerror}", hint="see warm_prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"the prompt {path} is not UTF-8 text") from error
    if len(content) > SIZE_MAX_BYTES:
        raise SettingsInvalid(f"the prompt {path} is larger than {SIZE_MAX_BYTES >> 20} MiB")
    if path.suffix != ".json":
        return of_text(path.name, text)
    try:
        return of_request(path.name, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise SettingsInvalid(f"the prompt {path} is not JSON: {error}") from error


def of_text(name: str, text: str) -> WarmPrompt:
    return of_request(name, {"messages": [{"role": "system", "content": text}]})


def of_request(name: str, body: object) -> WarmPrompt:
    """The prompt of a chat request."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise SettingsInvalid(
            f"the prompt {name} is not a chat request", hint='it needs {"messages": [...]}'
        )
    kept = {key: value for key, value in body.items() if key not in _DROPPED}
    messages = body["messages"]
    if not any(isinstance(one, dict) and one.get("role") == "user" for one in messages):
        kept["messages"] = [*messages, _USER_MESSAGE]
    return WarmPrompt(name, MappingProxyType(kept))
