"""Digests of our caches for other machines (`holders.RemotePrefixes` has what those report).

A digest lists turn hashes without the model's name (`proxy.cache.prompt`): the ends of the parts of
each answered prompt, and of its answer. A client gets only hashes of prompts that it sent itself,
because a client that has a hash can guess a text and check the guess. Entries are kept for half an
hour after their last use at most, the latest ones only, and none before a client asks for the first
time.
"""

from __future__ import annotations

import secrets
import struct
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.cache.prompt import Prompt, toggle_model_name

HASHES_MAX: Final = 8192
EXPIRES_S: Final = 1800.0
# An entry that is used again after this time is reported again, before it expires elsewhere.
_REFRESH_S: Final = EXPIRES_S / 3
_NUMBER: Final = struct.Struct("<Q")
_FORMAT: Final = 1
_MODELS_MAX: Final = 1024
_CURSOR_MAX_CHARACTERS: Final = 64
# Numbers of 8 bytes in base64, names, and the JSON around them.
DIGEST_MAX_BYTES: Final = 512 * 1024


class UnreadableDigest(Exception):
    """A response is not a digest that we can read."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The prefixes in a machine's caches, by its own model ids."""

    cursor: str  # Sent with the next request, to get only later entries.
    is_whole: bool  # Whether it replaces all earlier digests.
    hashes: Mapping[str, Sequence[int]]

    def to_bytes(self) -> bytes:
        models = {
            model: b64encode(b"".join(map(_NUMBER.pack, hashes))).decode()
            for model, hashes in self.hashes.items()
        }
        return orjson.dumps(
            {"format": _FORMAT, "cursor": self.cursor, "whole": self.is_whole, "models": models}
        )


def read_digest(body: bytes) -> Digest:
    """Parse a digest; raise UnreadableDigest if it is malformed or exceeds the limits."""
    try:
        match orjson.loads(body):
            case {"format": 1, "cursor": str(cursor), "whole": is_whole, "models": dict(models)}:
                hashes = {model: _unpack_hashes(text) for model, text in models.items()}
                count = sum(map(len, hashes.values()))
                is_short = len(cursor) <= _CURSOR_MAX_CHARACTERS and len(models) <= _MODELS_MAX
                if is_short and count <= HASHES_MAX:
                    return Digest(cursor, is_whole is True, hashes)
    except (ValueError, TypeError) as error:
        raise UnreadableDigest("not a digest") from error
    raise UnreadableDigest("not a digest of this format")


def _unpack_hashes(text: str) -> tuple[int, ...]:
    raw = b64decode(text, validate=True)
    if len(raw) % _NUMBER.size:
        raise ValueError("half a number")
    return tuple(number for (number,) in _NUMBER.iter_unpack(raw))


class PrefixDigests:
    """The prefixes that instances of this machine hold, by the client that sent them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_read = False  # Whether a client has asked; before that nothing need be noted.
        # By client, model and hash: number, time, instance; the latest last.
        self._entries: OrderedDict[tuple[str, str, int], tuple[int, float, str]] = OrderedDict()
        self._number = 0
        self._run = secrets.token_hex(8)

    def note(
        self,
        instance: str,
        model: str,
        client: str,
        prompt: Prompt,
        reply: Mapping[str, Any] | None,
    ) -> None:
        """Note that an instance answered a prompt of a client."""
        answered = (prompt.hash_with_reply(reply),) if reply else ()
        turns = map(prompt.shared_turn_hash, (*prompt.turn_hashes, *answered))
        self.add(instance, model, client, turns)

    def add(self, instance: str, model: str, client: str, turns: Iterable[int]) -> None:
        """Note turns, without an owner that shares caches, of a client's conversation."""
        now_s = self._clock()
        for turn_hash in turns:
            self._add((client, model, toggle_model_name(turn_hash, model)), instance, now_s)
        while len(self._entries) > HASHES_MAX:
            self._entries.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Note that the process of an instance was replaced, so its cache is gone."""
        held = [key for key, (*_, holder) in self._entries.items() if holder == instance]
        for key in held:
            del self._entries[key]
        if held:
            self._run = secrets.token_hex(8)

    def after(self, cursor: str, client: str | None, models: Iterable[str]) -> Digest | None:
        """Return the notes since the cursor of an earlier digest; None if there are none.

        Limited to these models, and to one client unless `client` is None. A cursor that is
        unknown, or older than the last replacement of a process, gets everything.
        """
        self.is_read = True
        run, _, after = cursor[:_CURSOR_MAX_CHARACTERS].partition("-")
        is_whole = run != self._run or not (after.isascii() and after.isdecimal())
        since = 0 if is_whole else int(after)
        if not is_whole and since >= self._number:
            return None
        found: dict[str, list[int]] = {model: [] for model in models}
        oldest_s = self._clock() - EXPIRES_S
        for (owner, model, turn_hash), (number, at_s, _) in reversed(self._entries.items()):
            if number <= since or at_s < oldest_s:
                break
            if model in found and client in {None, owner}:
                found[model].append(turn_hash)
        hashes = {model: tuple(reversed(hashes)) for model, hashes in found.items() if hashes}
        return Digest(f"{self._run}-{self._number}", is_whole, hashes)

    def _add(self, key: tuple[str, str, int], instance: str, now_s: float) -> None:
        _, noted_at_s, holder = self._entries.get(key, (0, -EXPIRES_S, ""))
        if holder == instance and now_s - noted_at_s < _REFRESH_S:
            return
        self._number += 1
        self._entries[key] = self._number, now_s, instance
        self._entries.move_to_end(key)
