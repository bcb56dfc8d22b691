"""Finds prefixes that many conversations share: all before a user's first message. Pure.

A prefix consists of the leading system and developer messages, the tools and other members that
shape a prompt, as a chat request that gives the same prompt. Conversations are told apart by the
first message behind the prefix, which each of their turns repeats.

Prompts of other APIs are covered only if every build translates them alike: Anthropic's system
prompt and plain tools, and the instructions of OpenAI's responses without tools, which builds
rewrite differently. Source: llama-server's conversions, builds 10434 and 11434.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from proxy.cache.prompt import (
    BLOCK_BYTES,
    Prompt,
    is_system,
    json_bytes,
    message_parts,
    read_prompt,
    without_stamp,
)
from proxy.upstream.endpoint_kinds import EndpointKind

# A prefix of three conversations is likely to be used by more; of two it may be chance.
_OFTEN: Final = 3
# A shorter prefix is computed in one batch, in about half a second.
_TOKENS_MIN: Final = 256
_TOKEN_BYTES: Final = 4
_SIZE_MAX_BYTES: Final = 1024**2
_PREFIXES_MAX: Final = 256
_CONVERSATIONS_MAX: Final = 64
_HASH_BYTES: Final = 8
_OF_ASSISTANT: Final = b"a"

LORA: Final = "lora"
# Members that shape the prompt rather than the answer.
_KWARGS: Final = "chat_template_kwargs"
_SHAPING: Final = (
    _KWARGS,
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
)
_MORE: Final = frozenset({"description", "type", "cache_control"})

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix as a chat request, and its length estimated from that."""

    body: Mapping[str, Any] = field(repr=False)
    tokens: int
    # Block hashes that every prompt with this prefix begins with.
    blocks: tuple[int, ...] = field(repr=False)


class SharedPrefixes:
    """Counts the conversations that share a prefix; keeps hashes of a bounded number."""

    def __init__(self) -> None:
        # The latest conversations with a prefix, and how many are not reported yet.
        self._seen: OrderedDict[bytes, tuple[deque[bytes], int]] = OrderedDict()

    def observe(
        self, model: str, kind: EndpointKind, members: Mapping[str, Any], prompt: Prompt | None
    ) -> SharedPrefix | None:
        """Count a request; return its prefix each time three more conversations share it.

        Ignores later turns.
        """
        if prompt is None or _OF_ASSISTANT in prompt.outline.labels:
            return None
        found = _read(kind, members)
        if found is None:
            return None
        prefix, first = found
        key = _hash(model.encode() + b"\0" + json_bytes(prefix))
        latest, unreported = self._seen.pop(key, (deque(maxlen=_CONVERSATIONS_MAX), 0))
        self._seen[key] = latest, unreported
        if len(self._seen) > _PREFIXES_MAX:
            self._seen.popitem(last=False)

        conversation = _hash(b"".join(message_parts(first)))
        if conversation in latest:
            return None
        latest.append(conversation)
        unreported = (unreported + 1) % _OFTEN
        self._seen[key] = latest, unreported
        return None if unreported else _shared_prefix(prefix, kind, prompt)


# A shorter beginning is not worth a separate file.
BEGINNING_BLOCKS_MIN: Final = 16
# Beginnings seen long ago count less: about the latest sixty count.
_KEPT: Final = 0.984
# Assumed share of beginnings that several conversations have, with the weight of one.
_PRIOR: Final = 0.5


class BeginningUse:
    """Estimates whether further conversations of one model will have the same beginning."""

    def __init__(self) -> None:
        # The latest beginnings, by their last block, and whether several conversations have them.
        self._seen: OrderedDict[int, bool] = OrderedDict()
        self._count = self._shared = 0.0

    def note(self, beginning: int) -> float:
        """Note that a conversation begins; return the probability that another begins alike."""
        share = min(1.0, (self._shared + _PRIOR) / (self._count + 1))
        before = self._seen.pop(beginning, None)
        self._seen[beginning] = before is not None
        if before is None:
            self._count, self._shared = _KEPT * self._count + 1, _KEPT * self._shared
        elif not before:
            self._shared += 1
        if len(self._seen) > _PREFIXES_MAX:
            self._seen.popitem(last=False)
        return share if before is None else max(share, _PRIOR)


def shared_prefix(model: str, body: Mapping[str, Any]) -> SharedPrefix | None:
    """Return the prefix of a chat request; None if it is too short to be worth a file."""
    found, prompt = _read(EndpointKind.CHAT, body), read_prompt(EndpointKind.CHAT, model, body)
    return _shared_prefix(found[0], EndpointKind.CHAT, prompt) if found and prompt else None


def _read(kind: EndpointKind, members: Mapping[str, Any]) -> _Prefix | None:
    """Return the prefix of a request, if it is long enough, and the first message behind it."""
    reader = _READERS.get(kind)
    found = reader(members) if reader else None
    if found and members.get(LORA):  # of another adapter, it is another prefix
        found = {**found[0], LORA: members[LORA]}, found[1]
    size_bytes = len(json_bytes(found[0])) if found else 0
    is_long = size_bytes // _TOKEN_BYTES >= _TOKENS_MIN
    return found if is_long and size_bytes <= _SIZE_MAX_BYTES else None


def _shared_prefix(body: dict[str, Any], kind: EndpointKind, prompt: Prompt) -> SharedPrefix:
    # Other APIs have the first leading message in a separate member.
    own = len(body["messages"]) - (kind is not EndpointKind.CHAT)
    return SharedPrefix(body, len(json_bytes(body)) // _TOKEN_BYTES, _blocks_before(prompt, own))


# Each reader returns a prefix as a chat request, and the first message behind it.

_Prefix = tuple[dict[str, Any], object]


def _chat(members: Mapping[str, Any]) -> _Prefix | None:
    return _split(members.get("messages"), {name: members.get(name) for name in _SHAPING})


def _anthropic(members: Mapping[str, Any]) -> _Prefix | None:
    system, tools = _join_system_text(members.get("system")), _functions(members.get("tools"))
    messages = members.get("messages")
    chooses = members.get("tool_choice") or {"type": "auto"}
    if system is None or tools is None or not isinstance(messages, list):
        return None
    if not isinstance(chooses, dict) or chooses.get("type") != "auto":
        return None
    shaping = {"tools": tools or None, _KWARGS: members.get(_KWARGS)}
    return _split([{"role": "system", "content": system}, *messages], shaping)


def _responses(members: Mapping[str, Any]) -> _Prefix | None:
    instructions, given = members.get("instructions"), members.get("input")
    if members.get("tools") or not isinstance(instructions, str):
        return None
    behind = given if isinstance(given, list) else [{"role": "user", "content": given}]
    if behind and is_system(behind[0]):
        return None
    shaping = {_KWARGS: members.get(_KWARGS)}
    return _split([{"role": "system", "content": instructions}, *behind], shaping)


_READERS: Final = {
    EndpointKind.CHAT: _chat,
    EndpointKind.MESSAGES: _anthropic,
    EndpointKind.RESPONSES: _responses,
}


def _split(messages: object, shaping: Mapping[str, Any]) -> _Prefix | None:
    if not isinstance(messages, list):
        return None
    leading = list(takewhile(is_system, messages))
    if len(leading) == len(messages) or not all(map(_is_text, leading)):
        return None
    shaped = {name: value for name, value in shaping.items() if value is not None}
    return {"messages": leading, **shaped}, messages[len(leading)]


def _is_text(message: Message) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(_text(part) is not None for part in parts)


def _text(part: object) -> str | None:
    if not isinstance(part, dict) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _join_system_text(system: object) -> str | None:
    """Return Anthropic's system prompt as one text, as the engine joins it."""
    if isinstance(system, str):
        return without_stamp(system)
    if not isinstance(system, list):
        return None
    texts = [text for block in system if (text := _text(block)) is not None]
    return None if len(texts) < len(system) else "".join(map(without_stamp, texts))


def _functions(tools: object) -> list[dict[str, Any]] | None:
    """Return Anthropic's tools in OpenAI's form; None if one has more than a name and a schema."""
    if tools is None:
        return []
    found = [_function(tool) for tool in tools] if isinstance(tools, list) else [None]
    functions = [function for function in found if function]
    return functions if len(functions) == len(found) else None


def _function(tool: object) -> dict[str, Any] | None:
    match tool:
        case {"name": str(name), "input_schema": dict(schema), **rest}:
            text = rest.get("description", "")
            is_custom = rest.get("type", "custom") == "custom" and isinstance(text, str)
            if is_custom and rest.keys() <= _MORE:
                function = {"name": name, "description": text, "parameters": schema}
                return {"type": "function", "function": function}
    return None


def _blocks_before(prompt: Prompt, message: int) -> tuple[int, ...]:
    outline = prompt.outline
    parts = zip(outline.messages, outline.sizes_bytes, strict=False)
    return prompt.blocks[: sum(size for number, size in parts if number < message) // BLOCK_BYTES]


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()
