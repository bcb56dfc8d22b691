"""The prompt of a request in one canonical form, hashed so that equal prefixes are found. Pure.

In every API, a prompt is a sequence of parts: the tools, then each text, tool call, tool result
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest

from proxy.cache.fingerprint import Scales, scales_of
from proxy.upstream.endpoint_kinds import EndpointKind

Role = Literal["tools", "system", "user", "assistant", "tool", "text"]

# By the first byte of a part: of its role (developer is a system's, function a tool's), or the
# separator if it has none, like tools.
_ROLES: Final[Mapping[int, Role]] = {
    0x1F: "tools",
    ord("s"): "system",
    ord("d"): "system",
    ord("u"): "user",
    ord("a"): "assistant",
    ord("t"): "tool",
    ord("f"): "tool",
}


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


def shared_blocks(blocks: Sequence[int], other: Sequence[int], at: int = 0) -> int:
    """Return how many blocks two prompts share; `blocks` begins at the place `at` of `other`."""
    most = min(len(blocks), len(other) - at)
    if most > 0 and blocks[most - 1] == other[at + most - 1]:  # and so all before it
        return most
    return bisect_left(range(most), 1, key=lambda place: blocks[place] != other[at + place])


def continues(blocks: Sequence[int], before: Sequence[int]) -> bool:
    return len(before) <= len(blocks) and (not before or blocks[len(before) - 1] == before[-1])


Part = bytes
_Numbered = tuple[int, Part]

_UNSEEN: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
# By the type of an item, the member with its content.
_CALLS: Final = {"tool_use": "input", "function_call": "arguments"}
_RESULTS: Final = {"tool_result": "content", "function_call_output": "output"}
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
_OF_USER: Final = b"user\x1f"
# Members that shape the prompt before its messages.
_SHAPING: Final = ("chat_template_kwargs", "tools", "functions")
_PIECE: Final = struct.Struct(f"{BLOCK_BYTES}s")


class CacheOwner(NamedTuple):
    """The owner of a conversation, for caches."""

    name: str = ""  # Name of the API key; empty if clients have none.
    is_alone: bool = False  # Whether it shares no cached prompts with other owners.

    @property
    def digest(self) -> str:
        """A name for other machines, 32 hexadecimal digits."""
        return _new_hasher(b"owner " + self.name.encode(), 16).hexdigest()


ANYONE: Final = CacheOwner()


# Not frozen: setting the attributes of a frozen one takes ten times as long.
@dataclass(slots=True)
class Prompt:
    """A prompt without its text. Nothing changes it."""

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
    scales: Scales  # Of the adapters that compute it.
    _name: int = field(repr=False)
    _hash: hashlib.blake2b = field(repr=False, compare=False)
    _owner: int = field(repr=False)

    def hash_with_reply(self, reply: Mapping[str, Any]) -> int:
        """Return the hash of this prompt with an assistant's message (OpenAI's chat API)."""
        hasher = self._hash.copy()
        hasher.update(b"".join(answer_parts(reply)))
        return int.from_bytes(hasher.digest(), "big") ^ self._name

    def shared_turn_hash(self, turn_hash: int) -> int:
        """Return a turn hash as other machines know it: without an owner that shares caches."""
        return turn_hash ^ self._owner

    @property
    def beginning_blocks(self) -> int:
        """The blocks of its tools and system prompt; 0 if it has answers, or no roles."""
        labels = self.outline.labels
        if not labels or ord("a") in labels:
            return 0
        parts = zip(labels, self.outline.sizes_bytes, strict=True)
        common = takewhile(lambda part: part[0] in COMMON, parts)
        return min(len(self.blocks), sum(size for _, size in common) // BLOCK_BYTES)

    @property
    def shared_hashes(self) -> tuple[int, ...]:
        """Hashes of the whole prompt, and of its part before the user's first message, if known.

        They are the same for all owners that share caches.
        """
        ends = (-1, self.first_own - 1) if self.first_own else (-1,)
        return tuple(self.shared_turn_hash(self.turn_hashes[end]) for end in ends)

    def known_to(self, blocks: int) -> Prompt:
        """Limit the prompt to the blocks that a client has sent before, for its questions."""
        return replace(self, blocks=self.blocks[:blocks], _owner=0)

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
    numbered = _numbered_parts(kind, members)
    if not numbered or len(numbered) > _PARTS_MAX:
        return None
    messages, parts = zip(*numbered, strict=True)
    sizes_bytes = tuple(map(len, parts))
    size_bytes = sum(sizes_bytes)
    outline = Outline((), sizes_bytes, (), b"")
    if size_bytes >= _OUTLINED_MIN_BYTES:
        labels = bytes([part[0] for part in parts]) if kind in CONVERSATIONS else b""
        outline = Outline(part_hashes(parts), sizes_bytes, messages, labels)
    lora = members.get("lora")
    # A client's `lora` may be long, so its seeds are not kept.
    seeds = _seeds if lora is None else _new_seeds
    chain, salt, hasher = seeds(model, owner, lora)
    name, earlier = _name_hash(model) ^ salt, max(0, len(parts) - _TURNS_MAX)
    hasher = hasher.copy()
    hasher.update(b"".join(parts[:earlier]))
    turn_hashes = []
    for part in parts[earlier:]:
        hasher.update(part)
        turn_hashes.append(int.from_bytes(hasher.digest(), "big") ^ name)
    first = next((at for at, part in enumerate(parts) if part.startswith(_OF_USER)), 0)
    return Prompt(
        _blocks(chain, b"".join(parts)[:_CUT_BYTES]),
        tuple(turn_hashes),
        max(1, size_bytes // _TOKEN_BYTES),
        xxh3_64_intdigest(parts[first]),
        max(0, first - earlier),
        outline,
        scales_of(lora) if lora else (),
        name,
        hasher,
        0 if owner.is_alone else salt,
    )


def with_answer(kind: EndpointKind, members: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a request whose prompt ends with this answer, which the engine is to continue.

    An answer at the end of a chat is replaced; a raw prompt is followed by the text.
    """
    if kind is EndpointKind.COMPLETION:
        return {**members, "prompt": members["prompt"] + text}
    messages = members["messages"]
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return {**members, "messages": [*messages, {"role": "assistant", "content": text}]}


def _new_seeds(model: str, owner: CacheOwner, lora: object) -> tuple[int, int, hashlib.blake2b]:
    """Return the seeds of the blocks, of the owner and of the turns."""
    seed = [model, lora, owner.name] if owner.is_alone else [model, lora]
    salt = _salt(owner)
    return xxh3_64_intdigest(orjson.dumps(seed)), salt, _new_hasher(orjson.dumps(lora))


_seeds: Final = lru_cache(maxsize=256)(_new_seeds)


def _salt(owner: CacheOwner) -> int:
    return _name_hash(f"\0{owner.name}") if owner.name else 0


def toggle_model_name(turn_hash: int, model: str) -> int:
    """Remove the model's name from a turn's hash, or mix it in again."""
    return turn_hash ^ _name_hash(model)


def toggle_owner(turn_hash: int, owner: CacheOwner) -> int:
    """Remove an owner that shares caches from a turn's hash, or mix it in again."""
    return turn_hash if owner.is_alone else turn_hash ^ _salt(owner)


def session_hash(model: str, client: str, session: str, scales: Scales = ()) -> int:
    """Hash a client's own name for a conversation; no other client or adapter can share it."""
    seed = [model, client, session, *([scales] if scales else [])]
    return int.from_bytes(_new_hasher(orjson.dumps(seed)).digest(), "big")


def part_hashes(parts: Iterable[Part]) -> tuple[int, ...]:
    return tuple(map(xxh3_64_intdigest, parts))


def _blocks(chain: int, text: bytes) -> tuple[int, ...]:
    pieces = _PIECE.iter_unpack(text[: len(text) - len(text) % BLOCK_BYTES])
    return tuple([chain := xxh3_64_intdigest(piece, chain) for (piece,) in pieces])


@lru_cache(maxsize=1024)
def _name_hash(model: str) -> int:
    return xxh3_64_intdigest(model.encode())


def _new_hasher(seed: bytes, size_bytes: int = _HASH_BYTES) -> hashlib.blake2b:
    return hashlib.blake2b(seed, digest_size=size_bytes)


# Parts of a prompt.


def is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in {"system", "developer"}


# The members with the system prompt and the messages, and those with texts.
CONVERSATIONS: Final = {
    EndpointKind.CHAT: ("", "messages"),
    EndpointKind.MESSAGES: ("system", "messages"),
    EndpointKind.RESPONSES: ("instructions", "input"),
}
_PROMPTS: Final = {
    EndpointKind.COMPLETION: ("prompt",),
    EndpointKind.LLAMA_COMPLETION: ("prompt",),
    EndpointKind.INFILL: ("input_prefix", "input_suffix", "prompt"),
}


def _numbered_parts(kind: EndpointKind, members: Mapping[str, Any]) -> list[_Numbered]:
    """Return the parts of a prompt in a template's order, each with the index of its message."""
    before = [_part("", name, json_bytes(members[name])) for name in _SHAPING if members.get(name)]
    found: list[_Numbered] = []
    if names := CONVERSATIONS.get(kind):
        system, messages = names
        if system:
            before += _content("system", _without_stamps(members.get(system)))
        given = members.get(messages)
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        for number, message in enumerate(given if isinstance(given, list) else ()):
            found += [(number, part) for part in message_parts(message)]
    elif texts := _PROMPTS.get(kind):
        extra = members.get("input_extra") if kind is EndpointKind.INFILL else None
        before += [_part("", "extra", json_bytes(extra))] if extra else []
        for name in texts:
            before += _text_or_tokens(members.get(name))
    else:
        return []
    return [(_NO_MESSAGE, part) for part in before] + found if before else found


def answer_parts(reply: Mapping[str, Any]) -> list[Part]:
    return message_parts({"role": "assistant", **reply})


def called_tools(reply: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that an answer calls, in the form of any API."""
    functions = [call.get("function") or {} for call in reply.get("tool_calls") or ()]
    content = reply.get("content")
    items = content if isinstance(content, list) else ()
    functions += [item for item in items if item.get("type") in _CALLS]
    return [str(function.get("name")) for function in functions]


def message_parts(message: object) -> list[Part]:
    if not isinstance(message, dict):
        return []
    role = message.get("role")
    if not isinstance(role, str):
        return _item("", message)
    parts = _content(role, message.get("content"))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(_call(function.get("name"), function.get("arguments")))
    return parts


_BILLING: Final = "x-anthropic-billing-header:"
_STAMP_MARK: Final = "cch="
_STAMP_CHARACTERS: Final = 5


def without_stamp(system: str) -> str:
    """Return a system text with the stamp that Claude Code changes in each request overwritten.

    The engine does the same, so that it finds the prompt in its cache. Source: llama-server, build
    10434, normalize_anthropic_billing_header.
    """
    if not system.startswith(_BILLING):
        return system
    begin = system.find(_STAMP_MARK, len(_BILLING)) + len(_STAMP_MARK)
    end = begin + _STAMP_CHARACTERS
    if begin < len(_BILLING) or system[end : end + 1] != ";":
        return system
    return system[:begin] + "f" * _STAMP_CHARACTERS + system[end:]


def _without_stamps(system: object) -> object:
    if isinstance(system, str):
        return without_stamp(system)
    blocks = system if isinstance(system, list) else []
    return [
        {**block, "text": without_stamp(block["text"])}
        if isinstance(block, dict) and isinstance(block.get("text"), str)
        else block
        for block in blocks
    ]


def has_text_only(messages: object) -> bool:
    given = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in given if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def _content(role: str, content: object) -> list[Part]:
    if isinstance(content, str):
        stripped = content.strip()
        return [_part(role, "text", stripped.encode())] if stripped else []
    items = content if isinstance(content, list) else ()
    return [part for item in items if isinstance(item, dict) for part in _item(role, item)]


def _item(role: str, item: Mapping[str, Any]) -> list[Part]:
    kind, text = item.get("type"), item.get("text")
    if not isinstance(kind, str):
        kind = ""  # a client's mistake, for the engine to report
    if kind in _CALLS:
        return [_call(item.get("name"), item.get(_CALLS[kind]))]
    if kind in _RESULTS:
        return _content("tool", item.get(_RESULTS[kind]))
    if kind in _TEXTS and isinstance(text, str):
        return _content(role, text)
    if kind in _UNSEEN:
        return []
    # An image, a sound or a file: all members count, except the cache mark.
    kept = {name: value for name, value in item.items() if name != "cache_control"}
    return [_data(role, json_bytes(kept), is_medium=kind in _MEDIA)]


def _data(role: str, content: bytes, *, is_medium: bool) -> Part:
    digest = hashlib.blake2b(content, digest_size=_DATA_HASH_BYTES).digest()
    return _part(role, "data", digest * (_MEDIUM_BYTES // len(digest)) if is_medium else digest)


def _call(name: object, arguments: object) -> Part:
    if isinstance(arguments, str) and len(arguments) <= _CALL_MAX_CHARACTERS:
        # A truncated call stays as written, and so does a call that is too long to parse.
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return _part("assistant", "call", json_bytes([name, arguments]))


def _text_or_tokens(prompt: object) -> list[Part]:
    if not isinstance(prompt, list) or _is_tokens(prompt):
        return _one_text(prompt)
    texts = ([part] if type(part) is int else part for part in prompt)
    return [part for text in texts for part in _one_text(text)]


def _one_text(prompt: object) -> list[Part]:
    if isinstance(prompt, str):
        return [prompt.encode()]
    if isinstance(prompt, list) and _is_tokens(prompt):
        # Four bytes per token, the average length of its text.
        tokens = array("I", map(_LOW_BITS.__and__, prompt))
        if sys.byteorder == "little":
            tokens.byteswap()
        return [tokens.tobytes()]
    if not isinstance(prompt, dict):
        return []
    text, media = prompt.get("prompt_string"), prompt.get("multimodal_data")
    media = media if isinstance(media, list) else ()
    data = [_data("", json_bytes(medium), is_medium=True) for medium in media]
    return [text.encode() if isinstance(text, str) else b"", *data]


def _is_tokens(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) <= {int}


def _part(role: str, kind: str, content: bytes) -> Part:
    return b"%s\x1f%s\x1f%s\x1e" % (role.encode(), kind.encode(), content)


def json_bytes(value: object) -> bytes:
    """Return JSON with sorted members."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return b""  # nested deeper than it writes, which no template reads either
