"""Prompts that clients' conversations begin with, kept to be read ahead at the next start.

    prompts/MODEL/HASH.json    a chat request: the system prompt and the tools of many conversations

Only of models whose settings ask for it (`learn_prompts`), some for each model: the one used least
recently leaves for another. Names are hashes of what is in the file; the directories of models bear
names that the settings have checked. Nothing is kept in memory, so commands may work on the same
directory as a daemon. Everything here blocks; call it in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from supervisor.errors import AccessDenied, SettingsInvalid
from supervisor.events import Emit
from supervisor.host.files import write_atomic
from supervisor.host.paths import is_ours, make_private
from supervisor.warmup import prompts
from supervisor.warmup.prompts import WarmPrompt

# As many as an instance has slots by default.
_MODEL_MAX: Final = 4
_HASH_BYTES: Final = 8


class LearnedPrompts:
    """The learned prompts of one data directory.

    Args:
        root: Made when first written to, 0700.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = threading.Lock()

    def keep(self, model: str, body: Mapping[str, Any]) -> str:
        """Keep a prompt as the one used last, and return its name.

        Raises:
            AccessDenied: The directory cannot be used.
            OSError: The disk refused; nothing was kept.
        """
        text = orjson.dumps(body).decode()
        name = f"{hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).hexdigest()}.json"
        with self._turn:
            make_private(self._root)
            directory = make_private(self._root / model)
            write_atomic(directory / name, text)
            self._bound(directory)
        return name

    def prompts(self, model: str) -> list[WarmPrompt]:
        """Return a model's prompts, the one used last first; what cannot be read is left out."""
        found: list[WarmPrompt] = []
        if not is_ours(self._root / model):
            return found
        for path in _latest(self._root / model):
            with suppress(SettingsInvalid):
                found.append(prompts.read(path))
        return found

    def counts(self) -> dict[str, int]:
        """Return how many prompts each model has, of those that have any."""
        found = {path.name: len(_latest(path)) for path in self._directories()}
        return {model: count for model, count in found.items() if count}

    def forget(self, model: str | None = None) -> int:
        """Delete the prompts of a model, or of all; return how many there were."""
        count = 0
        for directory in self._directories():
            if model in {None, directory.name}:
                count += len(_latest(directory))
                shutil.rmtree(directory)
        return count

    def _bound(self, directory: Path) -> None:
        """Delete what is too much, and what somebody who died left half written."""
        kept = set(_latest(directory)[:_MODEL_MAX])
        for path in directory.iterdir():
            if path not in kept:
                path.unlink(missing_ok=True)

    def _directories(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return [path for path in sorted(self._root.iterdir()) if path.is_dir()]


async def keep(
    learned: LearnedPrompts, model: str, body: Mapping[str, Any], tokens: int, emit: Emit
) -> None:
    """Keep a prompt, and tell; a disk that refuses fails nothing.

    Args:
        learned: Where.
        model: Whose conversations begin with it.
        body: A chat request.
        tokens: How many tokens it may have.
        emit: Where events go.
    """
    try:
        name = await asyncio.to_thread(learned.keep, model, body)
    except (OSError, AccessDenied) as error:
        emit("prompt.store_failed", model=model, reason=str(error))
    else:
        emit("prompt.stored", model=model, prompt=name, tokens=tokens)


def _latest(directory: Path) -> list[Path]:
    """Return the prompts in a directory, the one used last first."""
    return sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
