"""Prompts to prefill: those of the settings, and prefixes learned from clients' conversations.

The first request with such a prompt is then fast. A `.json` file is a chat request as a client
would send it; members that do not form the prompt are dropped. Any other file is the text of a
system prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.events import Emit
from supervisor.system.files import open_regular, write_atomic
from supervisor.system.paths import file_name, is_ours, make_private, name_of_file

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
    """Read a prompt file. Raises SettingsInvalid: it is missing, too large, or not a prompt."""
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
    """Return the prompt of a chat request; raises SettingsInvalid."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise SettingsInvalid(
            f"the prompt {name} is not a chat request", hint='it needs {"messages": [...]}'
        )
    kept = {key: value for key, value in body.items() if key not in _DROPPED}
    messages = body["messages"]
    if not any(isinstance(message, dict) and message.get("role") == "user" for message in messages):
        kept["messages"] = [*messages, _USER_MESSAGE]
    return WarmPrompt(name, MappingProxyType(kept))


#     prompts/MODEL/HASH.json    a chat request: the system prompt and tools of many conversations
#
# Only for models with `learn_prompts`, a few per model: the least recently used is replaced. Names
# are hashes of the content. Nothing is held in memory, so commands may change the directory of a
# running daemon. All methods block; call them in a thread.

# The default number of slots of an instance.
_MODEL_MAX: Final = 4
_HASH_BYTES: Final = 8


class LearnedPrompts:
    """The learned prompts in a data directory, which the first write makes, with mode 0700."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()

    def save(self, model: str, body: Mapping[str, Any]) -> str:
        """Save a prompt as the latest used, and return its name.

        Raises AccessDenied for the directory, and OSError of the disk; then nothing was saved.
        """
        text = orjson.dumps(body).decode()
        name = f"{hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).hexdigest()}.json"
        with self._lock:
            make_private(self._root)
            directory = make_private(self._directory(model))
            write_atomic(directory / name, text)
            kept = set(_latest_first_paths(directory)[:_MODEL_MAX])
            for path in directory.iterdir():
                if path not in kept:
                    path.unlink(missing_ok=True)
        return name

    def prompts(self, model: str) -> list[WarmPrompt]:
        """Return a model's readable prompts, the latest used first."""
        found: list[WarmPrompt] = []
        directory = self._directory(model)
        if not is_ours(directory):
            return found
        for path in _latest_first_paths(directory):
            with suppress(SettingsInvalid):
                found.append(read(path))
        return found

    def counts(self) -> dict[str, int]:
        found = ((path.name, len(_latest_first_paths(path))) for path in self._directories())
        return {name_of_file(name): count for name, count in found if count}

    def forget(self, model: str | None = None) -> int:
        count = 0
        for directory in self._directories():
            if model is None or directory == self._directory(model):
                count += len(_latest_first_paths(directory))
                shutil.rmtree(directory)
        return count

    def _directory(self, model: str) -> Path:
        return self._root / file_name(model)

    def _directories(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return [path for path in sorted(self._root.iterdir()) if path.is_dir()]


async def save_and_emit(
    learned: LearnedPrompts, model: str, body: Mapping[str, Any], tokens: int, emit: Emit
) -> None:
    """Save a prompt of up to `tokens` tokens, and emit an event; a disk error is only reported."""
    try:
        name = await asyncio.to_thread(learned.save, model, body)
    except (OSError, AccessDenied) as error:
        emit("prompt.store_failed", model=model, reason=str(error))
    else:
        emit("prompt.stored", model=model, prompt=name, tokens=tokens)


def _latest_first_paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
