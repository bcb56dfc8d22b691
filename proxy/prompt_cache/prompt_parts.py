"""The parts of a prompt, as bytes, whichever API it comes by. Pure.

A part is a role, what kind of thing it is, and that thing: a text, a tool call by name and
arguments, a tool's result, the hash of an image. What clients change on the way back is left out:
ids of calls, the reasoning that led to an answer, white space around a text, where the cache is to
be marked, how JSON is written.

Source: OpenAI's chat, completions and responses APIs, Anthropic's messages API, and llama-server's
own pages, as builds 10434 and 11434 read them.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import orjson

from proxy.endpoints import EndpointKind

Part = bytes

_UNSEEN: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_HASH_BYTES: Final = 16
_CALL_MAX_CHARACTERS: Final = 64 * 1024
_LOW_BITS: Final = 0xFFFFFFFF


def prompt_parts(kind: EndpointKind, members: Mapping[str, Any]) -> Iterator[Part]:
    """Return the parts of a request's prompt, in the order in which a template puts them."""
    if (reader := _READERS.get(kind)) is None:
        return
    for name in ("chat_template_kwargs", "tools", "functions"):
        if said := members.get(name):
            yield _part("", name, _json(said))
    yield from reader(members)


def answer_parts(reply: Mapping[str, Any]) -> Iterator[Part]:
    """Return the parts of an answer, an assistant's message in the words of the chat API."""
    return _message({"role": "assistant", **reply})


def _chat(members: Mapping[str, Any]) -> Iterator[Part]:
    return _messages(members.get("messages"))


def _anthropic(members: Mapping[str, Any]) -> Iterator[Part]:
    yield from _content("system", members.get("system"))
    yield from _messages(members.get("messages"))


def _responses(members: Mapping[str, Any]) -> Iterator[Part]:
    yield from _content("system", members.get("instructions"))
    given = members.get("input")
    if isinstance(given, str):
        yield from _content("user", given)
    else:
        yield from _messages(given)


def _completion(members: Mapping[str, Any]) -> Iterator[Part]:
    return _text_or_tokens(members.get("prompt"))


def _infill(members: Mapping[str, Any]) -> Iterator[Part]:
    if extra := members.get("input_extra"):
        yield _part("", "extra", _json(extra))
    for name in ("input_prefix", "input_suffix", "prompt"):
        yield from _text_or_tokens(members.get(name))


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


def _messages(given: object) -> Iterator[Part]:
    if isinstance(given, list):
        for message in given:
            if isinstance(message, dict):
                yield from _message(message)


def _message(message: Mapping[str, Any]) -> Iterator[Part]:
    """Return the parts of a chat message, or of an item of the responses API."""
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
    """Return the parts of a piece of content, or of an item of the responses API."""
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
        kind = None  # a client's mistake, for the engine to tell
    if kind in _TEXTS and isinstance(text, str):
        yield from _text(role, text)
    elif kind not in _UNSEEN:
        # An image, a sound, a file: all of it counts, but not where to mark the cache.
        kept = {name: said for name, said in item.items() if name != "cache_control"}
        yield _part(role, "data", hashlib.blake2b(_json(kept), digest_size=_HASH_BYTES).digest())


def _text(role: str, text: str) -> Iterator[Part]:
    if stripped := text.strip():
        yield _part(role, "text", stripped.encode())


def _call(name: object, arguments: object) -> Part:
    if isinstance(arguments, str) and len(arguments) <= _CALL_MAX_CHARACTERS:
        # A call that was broken off stays as it was written; so does one that is too long to parse.
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return _part("assistant", "call", _json([name, arguments]))


def _text_or_tokens(prompt: object) -> Iterator[Part]:
    """Return the parts of a prompt without roles: a text, tokens, or several of either."""
    if isinstance(prompt, list) and not _is_tokens(prompt):
        for one in prompt:
            yield from _one_text([one] if type(one) is int else one)
    else:
        yield from _one_text(prompt)


def _one_text(prompt: object) -> Iterator[Part]:
    if isinstance(prompt, str):
        yield prompt.encode()
    elif isinstance(prompt, list) and _is_tokens(prompt):
        # Four bytes for each token, as many as its text has on average.
        tokens = array("I", map(_LOW_BITS.__and__, prompt))
        if sys.byteorder == "little":
            tokens.byteswap()
        yield tokens.tobytes()
    elif isinstance(prompt, dict):
        text = prompt.get("prompt_string")
        yield text.encode() if isinstance(text, str) else b""
        yield _part("", "data", _json(prompt.get("multimodal_data")))


def _is_tokens(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) <= {int}


def _part(role: str, kind: str, content: bytes) -> Part:
    return b"%s\x1f%s\x1f%s\x1e" % (role.encode(), kind.encode(), content)


def _json(said: object) -> bytes:
    try:
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return b""  # nested deeper than it writes, which no template reads either
