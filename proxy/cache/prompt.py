"""The prompt of a request in one canonical form, hashed so that equal prefixes are found. Pure.

Whatever its API, a prompt is a sequence of parts: the tools, then each text, tool call, tool result
and medium (its hash, repeated to the length of its tokens) with its role. Everything that clients
change when they repeat a message is left out: ids of calls, the reasoning, white space around a
text, cache marks, the formatting of JSON. A response is read by the same rules, so the next request
of its conversation is recognised. An `Outline` lists the parts in order, without their text.

Hashes are seeded with the model and its LoRA, so different models share none. They are the same in
every process: a saved conversation is recognised after a restart. Blocks are only hints, so a fast
hash is enough, even if a client could construct collisions. The model is mixed into a turn's hash
last, and `toggle_model_name` takes it out again, because another machine may have another name for
it. The owner is mixed in the same way: owners share no conversation, but they share blocks unless
one is alone.

Source: OpenAI's chat, completions and responses APIs, Anthropic's messages API, and llama-server's
own endpoints, as builds 10434 and 11434 read them.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest

from proxy.upstream.endpoint_kinds import EndpointKind

Role = Literal["tools", "system", "user", "assistant", "tool", "text"]

# By the first byte of a part: of its role, or the separator if it has none, like tools.
_ROLES: Final[Mapping[int, Role]] = MappingProxyType(
    {
        0x1F: "tools",
        ord("s"): "system",
        ord("d"): "system",  # developer
        ord("u"): "user",
        ord("a"): "assistant",
        ord("t"): "tool",
        ord("f"): "tool",  # function
    }
)


# First bytes of the parts that conversations have in common: tools and system prompts.
COMMON: Final = frozenset(b"\x1fsd")


class Outline(NamedTuple):
    """The parts of a prompt: tools, then each text, call, result and medium.

    A short prompt has only the sizes.
    """

    hashes: Sequence[int]  # Hash of each part alone.
    sizes_bytes: Sequence[int]
    # Index of each part's message in the request; -1 for none, such as tools, and the system prompt
    # of some APIs.
    messages: Sequence[int]
    labels: bytes  # The first byte of each part's role; empty for prompts without roles.

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)

    def role(self, part: int) -> Role:
        """Return the role of a part: `tools` also for template arguments, `text` without a role."""
        return _ROLES.get(self.labels[part], "text") if part < len(self.labels) else "text"


NO_OUTLINE: Final = Outline((), (), (), b"")


def shared_blocks(blocks: Sequence[int], other: Sequence[int]) -> int:
    most = min(len(blocks), len(other))
    return bisect_left(range(most), 1, key=lambda at: blocks[at] != other[at])


def continues(blocks: Sequence[int], before: Sequence[int]) -> bool:
    return len(before) <= len(blocks) and (not before or blocks[len(before) - 1] == before[-1])


Part = bytes
_Numbered = tuple[int, Part]

_UNSEEN: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA: Final = frozenset({"image_url", "input_image", "image", "input_audio", "input_video"})
_DATA_HASH_BYTES: Final = 16
# A picture has 256 tokens and more: Gemma 3 makes 256 of each, LLaVA 1.5 576.
_MEDIUM_BYTES: Final = 1024
_CALL_MAX_CHARACTERS: Final = 64 * 1024
_LOW_BITS: Final = 0xFFFFFFFF
BLOCK_BYTES: Final = 64
_NO_MESSAGE: Final = -1
# A shorter prompt is not worth an explanation of its cache miss.
_OUTLINED_MIN_BYTES: Final = 128
# English text with its template has about one token per 4 bytes.
_TOKEN_BYTES: Final = 4
BLOCK_TOKENS: Final = BLOCK_BYTES // _TOKEN_BYTES
# The first half million bytes of a prompt are hashed in blocks; the rest only in turn hashes.
_CUT_BYTES: Final = 8192 * BLOCK_BYTES
# Only the last turns of a longer history get a hash; a prompt with more parts than this is not
# read.
_TURNS_MAX: Final = 32
_PARTS_MAX: Final = 8192
_HASH_BYTES: Final = 8
_WITH_ROLES: Final = frozenset({EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES})
_OF_USER: Final = b"user\x1f"
_PIECE: Final = struct.Struct(f"{BLOCK_BYTES}s")


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """The owner of a conversation, for caches."""

    name: str = ""  # Name of the API key; empty if clients have none.
    is_alone: bool = False  # Whether it shares no cached prompts with other owners.

    @property
    def digest(self) -> str:
        """A name for other machines, 32 hexadecimal digits."""
        return _new_hasher(b"owner " + self.name.encode(), 16).hexdigest()


ANYONE: Final = CacheOwner()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt without its text."""

    # Hashes of its 64-byte pieces, each including all before it; at most 8192. Two prompts share as
    # many hashes as pieces.
    blocks: tuple[int, ...]
    # Hashes of the prompt up to the end of each of its last parts, at most 32; the last hash covers
    # the whole prompt.
    turn_hashes: tuple[int, ...]
    tokens: int  # Estimated from its length, at least 1.
    # Hash of the user's first message, the same in each turn of a conversation; without roles, of
    # the first part.
    beginning: int
    # Index of the first of the `turn_hashes` that includes that message; earlier ones are of parts
    # that conversations share.
    first_own: int
    outline: Outline = field(repr=False)
    _name: int = field(repr=False)
    _hash: hashlib.blake2b = field(repr=False, compare=False)
    _owner: int = field(repr=False)

    def hash_with_reply(self, reply: Mapping[str, Any]) -> int:
        """Return the hash of this prompt with an assistant's message (OpenAI's chat API)."""
        hasher = self._hash.copy()
        for part in answer_parts(reply):
            hasher.update(part)
        return _number(hasher) ^ self._name

    def shared_turn_hash(self, turn_hash: int) -> int:
        """Return a turn hash as other machines know it: without an owner that shares caches."""
        return turn_hash ^ self._owner

    def known_to(self, blocks: int) -> Prompt:
        """Limit the prompt to the blocks that a client has sent before, for its questions."""
        return replace(self, blocks=self.blocks[:blocks], _owner=0)

    @property
    def shared_tokens(self) -> int:
        """Estimated tokens of the parts that conversations share, 0 without any."""
        return self.tokens_until(self.first_own - 1) if self.first_own else 0

    def tokens_until(self, turn: int) -> int:
        sizes_bytes = self.outline.sizes_bytes
        after = len(sizes_bytes) - len(self.turn_hashes) + turn + 1
        return max(1, self.tokens - sum(sizes_bytes[after:]) // _TOKEN_BYTES)


def read_prompt(
    kind: EndpointKind, model: str, members: Mapping[str, Any], owner: CacheOwner = ANYONE
) -> Prompt | None:
    """Return the prompt of a request, or None if it has none or too many parts.

    Takes 0.1 ms for 20 kB and is bounded for any length. Never fails: invalid members are for the
    engine to refuse.
    """
    numbered = list(islice(_numbered_parts(kind, members), _PARTS_MAX + 1))
    if not numbered or len(numbered) > _PARTS_MAX:
        return None
    messages, parts = zip(*numbered, strict=True)
    sizes_bytes = tuple(map(len, parts))
    if sum(sizes_bytes) < _OUTLINED_MIN_BYTES:
        outline = Outline((), sizes_bytes, (), b"")
    else:
        labels = bytes([part[0] for part in parts]) if kind in _WITH_ROLES else b""
        outline = Outline(part_hashes(parts), sizes_bytes, messages, labels)
    return _prompt(model, members.get("lora"), parts, outline, owner)


def toggle_model_name(turn_hash: int, model: str) -> int:
    """Remove the model's name from a turn's hash, or mix it in again."""
    return turn_hash ^ _name_hash(model)


def session_hash(model: str, client: str, session: str) -> int:
    """Hash a client's own name for a conversation; no other client can share it."""
    return _number(_new_hasher(orjson.dumps([model, client, session])))


def part_hashes(parts: Iterable[Part]) -> tuple[int, ...]:
    return tuple(map(xxh3_64_intdigest, parts))


def _prompt(
    model: str, lora: object, parts: Sequence[Part], outline: Outline, owner: CacheOwner
) -> Prompt:
    salt = _name_hash(f"\0{owner.name}") if owner.name else 0
    last, name = parts[-_TURNS_MAX:], _name_hash(model) ^ salt
    earlier = len(parts) - len(last)
    hasher = _new_hasher(orjson.dumps(lora))
    hasher.update(b"".join(parts[:earlier]))
    turn_hashes = tuple(_turn_hashes(hasher, last, name))
    seed = [model, lora, owner.name] if owner.is_alone else [model, lora]
    blocks = tuple(_blocks(xxh3_64_intdigest(orjson.dumps(seed)), _beginning(parts)))
    first = next((at for at, part in enumerate(parts) if part.startswith(_OF_USER)), 0)
    return Prompt(
        blocks,
        turn_hashes,
        max(1, sum(outline.sizes_bytes) // _TOKEN_BYTES),
        xxh3_64_intdigest(parts[first]),
        max(0, first - earlier),
        outline,
        name,
        hasher,
        0 if owner.is_alone else salt,
    )


def _beginning(parts: Sequence[Part]) -> bytes:
    text = bytearray()
    for part in parts:
        text += part[: _CUT_BYTES - len(text)]
        if len(text) >= _CUT_BYTES:
            break
    return bytes(text)


def _turn_hashes(hasher: hashlib.blake2b, parts: Iterable[Part], name: int) -> Iterable[int]:
    for part in parts:
        hasher.update(part)
        yield _number(hasher) ^ name


def _blocks(chain: int, text: bytes) -> list[int]:
    whole = len(text) - len(text) % BLOCK_BYTES
    pieces = _PIECE.iter_unpack(text[:whole])
    return [chain := xxh3_64_intdigest(piece, chain) for (piece,) in pieces]


@lru_cache(maxsize=1024)
def _name_hash(model: str) -> int:
    return xxh3_64_intdigest(model.encode())


def _new_hasher(seed: bytes, size_bytes: int = _HASH_BYTES) -> hashlib.blake2b:
    return hashlib.blake2b(seed, digest_size=size_bytes)


def _number(hasher: hashlib.blake2b) -> int:
    return int.from_bytes(hasher.digest(), "big")


# Parts of a prompt.


def prompt_parts(kind: EndpointKind, members: Mapping[str, Any]) -> Iterator[Part]:
    """Return the parts of a prompt in a template's order."""
    return (part for _, part in _numbered_parts(kind, members))


def _numbered_parts(kind: EndpointKind, members: Mapping[str, Any]) -> Iterator[_Numbered]:
    """Yield each part with the index of its message, -1 for none."""
    if (reader := _READERS.get(kind)) is None:
        return
    for name in ("chat_template_kwargs", "tools", "functions"):
        if value := members.get(name):
            yield _NO_MESSAGE, _part("", name, _json(value))
    yield from reader(members)


def answer_parts(reply: Mapping[str, Any]) -> Iterator[Part]:
    return _message({"role": "assistant", **reply})


def _chat(members: Mapping[str, Any]) -> Iterator[_Numbered]:
    return _messages(members.get("messages"))


def _anthropic(members: Mapping[str, Any]) -> Iterator[_Numbered]:
    yield from _number_parts(_NO_MESSAGE, _content("system", members.get("system")))
    yield from _messages(members.get("messages"))


def _responses(members: Mapping[str, Any]) -> Iterator[_Numbered]:
    yield from _number_parts(_NO_MESSAGE, _content("system", members.get("instructions")))
    given = members.get("input")
    if isinstance(given, str):
        yield from _number_parts(0, _content("user", given))
    else:
        yield from _messages(given)


def _completion(members: Mapping[str, Any]) -> Iterator[_Numbered]:
    return _number_parts(_NO_MESSAGE, _text_or_tokens(members.get("prompt")))


def _infill(members: Mapping[str, Any]) -> Iterator[_Numbered]:
    if extra := members.get("input_extra"):
        yield _NO_MESSAGE, _part("", "extra", _json(extra))
    for name in ("input_prefix", "input_suffix", "prompt"):
        yield from _number_parts(_NO_MESSAGE, _text_or_tokens(members.get(name)))


def _number_parts(message: int, parts: Iterable[Part]) -> Iterator[_Numbered]:
    for part in parts:
        yield message, part


_READERS: Final = MappingProxyType(
    {
        EndpointKind.CHAT: _chat,
        EndpointKind.MESSAGES: _anthropic,
        EndpointKind.RESPONSES: _responses,
        EndpointKind.COMPLETION: _completion,
        EndpointKind.LLAMA_COMPLETION: _completion,
        EndpointKind.INFILL: _infill,
    }
)


def _messages(given: object) -> Iterator[_Numbered]:
    if isinstance(given, list):
        for number, message in enumerate(given):
            if isinstance(message, dict):
                for part in _message(message):
                    yield number, part


def _message(message: Mapping[str, Any]) -> Iterator[Part]:
    role = message.get("role")
    if not isinstance(role, str):
        yield from _item("", message)
        return
    yield from _content(role, message.get("content"))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _call(function.get("name"), function.get("arguments"))


def _content(role: str, content: object) -> Iterator[Part]:
    if isinstance(content, str):
        yield from _text(role, content)
    elif isinstance(content, list):
        for item in content:
            if isinstance(item, dict):
                yield from _item(role, item)


def _item(role: str, item: Mapping[str, Any]) -> Iterator[Part]:
    match item.get("type"):
        case "tool_use":
            yield _call(item.get("name"), item.get("input"))
        case "function_call":
            yield _call(item.get("name"), item.get("arguments"))
        case "tool_result":
            yield from _result(item.get("content"))
        case "function_call_output":
            yield from _result(item.get("output"))
        case _:
            yield from _text_or_data(role, item)


def _result(content: object) -> Iterator[Part]:
    if isinstance(content, str):
        yield from _text("tool", content)
    elif isinstance(content, list):
        for item in content:
            if isinstance(item, dict):
                yield from _text_or_data("tool", item)


def _text_or_data(role: str, item: Mapping[str, Any]) -> Iterator[Part]:
    kind, text = item.get("type"), item.get("text")
    if not isinstance(kind, str):
        kind = None  # a client's mistake, for the engine to report
    if kind in _TEXTS and isinstance(text, str):
        yield from _text(role, text)
    elif kind not in _UNSEEN:
        # An image, a sound or a file: all members count, except the cache mark.
        kept = {name: value for name, value in item.items() if name != "cache_control"}
        yield _data(role, _json(kept), is_medium=kind in _MEDIA)


def _data(role: str, content: bytes, *, is_medium: bool) -> Part:
    digest = hashlib.blake2b(content, digest_size=_DATA_HASH_BYTES).digest()
    return _part(role, "data", digest * (_MEDIUM_BYTES // len(digest)) if is_medium else digest)


def _text(role: str, text: str) -> Iterator[Part]:
    if stripped := text.strip():
        yield _part(role, "text", stripped.encode())


def _call(name: object, arguments: object) -> Part:
    if isinstance(arguments, str) and len(arguments) <= _CALL_MAX_CHARACTERS:
        # A truncated call stays as written, and so does one that is too long to parse.
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return _part("assistant", "call", _json([name, arguments]))


def _text_or_tokens(prompt: object) -> Iterator[Part]:
    if isinstance(prompt, list) and not _is_tokens(prompt):
        for part in prompt:
            yield from _one_text([part] if type(part) is int else part)
    else:
        yield from _one_text(prompt)


def _one_text(prompt: object) -> Iterator[Part]:
    if isinstance(prompt, str):
        yield prompt.encode()
    elif isinstance(prompt, list) and _is_tokens(prompt):
        # Four bytes per token, the average length of its text.
        tokens = array("I", map(_LOW_BITS.__and__, prompt))
        if sys.byteorder == "little":
            tokens.byteswap()
        yield tokens.tobytes()
    elif isinstance(prompt, dict):
        text = prompt.get("prompt_string")
        yield text.encode() if isinstance(text, str) else b""
        media = prompt.get("multimodal_data")
        for medium in media if isinstance(media, list) else ():
            yield _data("", _json(medium), is_medium=True)


def _is_tokens(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) <= {int}


def _part(role: str, kind: str, content: bytes) -> Part:
    return b"%s\x1f%s\x1f%s\x1e" % (role.encode(), kind.encode(), content)


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return b""  # nested deeper than it writes, which no template reads either
