"""The chat request that has the same prompt as a request of another API, and its messages. Pure.

The engine translates Anthropic's messages and OpenAI's responses to its chat API before it renders
a prompt. These translations are repeated here, so that a prompt of any of the three APIs can be
rendered (`/apply-template`), and the form in which clients send back answers is learned once.

Source: tools/server/server-chat.cpp of llama.cpp, builds 10434 and 11434, whose choices are
repeated here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import orjson

from proxy.cache.prompt import without_stamp
from proxy.request.variants import MEMBER
from proxy.upstream.endpoint_kinds import EndpointKind

Message = Mapping[str, Any]


class _Untranslated(Exception):
    """The engine refuses this request, or its translation is unknown."""


def chat_form(kind: EndpointKind, members: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the members of the chat request; None if it is unknown, or the engine refuses it.

    The member `messages` of the result is a list.
    """
    given = members
    try:
        if kind is EndpointKind.MESSAGES:
            given = anthropic_chat(members) if isinstance(members.get("messages"), list) else {}
        elif kind is EndpointKind.RESPONSES:
            given = _responses_chat(members)
        elif kind is not EndpointKind.CHAT:
            return None
    except (_Untranslated, LookupError, TypeError, AttributeError):
        return None
    return given if isinstance(given.get("messages"), list) else None


def chat_answer(kind: EndpointKind, reply: Message) -> Message:
    """Return a message or a response (`Completion.reply`) as the chat API's message."""
    given = reply.get("content")
    blocks = [block for block in given if isinstance(block, dict)] if given else []
    if kind is EndpointKind.MESSAGES:
        return next(_message("assistant", blocks), {"role": "assistant", "content": ""})
    # A response's reply has the parts of its messages beside its other items.
    items = [
        {"type": "message", "role": "assistant", "content": [block]}
        if block.get("type") == "output_text"
        else {"summary": [], **block}
        for block in blocks
    ]
    try:
        found = _items(items)
    except (_Untranslated, LookupError, TypeError, AttributeError):
        found = []
    return found[0] if len(found) == 1 else {"role": "assistant", "content": ""}


def picture_data(messages: Sequence[Message]) -> list[str] | None:
    """Return the pictures of a chat, in base64; None if it has other media, or links to some."""
    found: list[str] = []
    contents = [message.get("content") for message in messages]
    for part in (part for content in contents if isinstance(content, list) for part in content):
        match part:
            case {"type": "text"}:
                continue
            case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
                _, mark, data = url.partition(";base64,")
                if not mark:
                    return None
                found.append(data)
            case _:
                return None
    return found


# Anthropic's messages.


_KEPT: Final = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", MEMBER)
_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_MAX_TOKENS: Final = 4096
_THINKING_TOKENS: Final = 10_000


def anthropic_chat(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request; the engine refuses members that do not have Anthropic's types."""
    asked = {name: members[name] for name in _KEPT if name in members}
    asked["messages"] = []
    system = members.get("system")
    if system is not None:
        texts = [system] if isinstance(system, str) else _texts(system)
        text = "".join(map(without_stamp, texts))
        asked["messages"].append({"role": "system", "content": text})
    asked["messages"] += _messages(members["messages"])
    asked["max_tokens"] = members.get("max_tokens", _MAX_TOKENS)
    if "stop_sequences" in members:
        asked["stop"] = members["stop_sequences"]
    if members.get("stream") is True:
        asked["stream_options"] = {"include_usage": True}
    match members.get("thinking"):
        case {"type": "enabled", **given}:
            asked["thinking_budget_tokens"] = given.get("budget_tokens", _THINKING_TOKENS)
    return asked | _tools(members)


def _texts(blocks: object) -> Iterator[str]:
    for block in blocks if isinstance(blocks, list) else ():
        match block:
            case {"type": "text", "text": str(text)}:
                yield text


def _messages(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        match message:
            case {"role": str(role), "content": list(blocks)}:
                yield from _message(role, [block for block in blocks if isinstance(block, dict)])
            case _:
                yield message


def _message(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    content = [part for block in blocks if (part := _part(block))]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thinking = (block.get("thinking") for block in blocks if block.get("type") == "thinking")
    thoughts = [thought for thought in thinking if isinstance(thought, str) and thought]
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if content or calls or thoughts:
        yield message
    for block in blocks:
        if block.get("type") == "tool_result":
            yield _result(block)


def _part(block: Mapping[str, Any]) -> dict[str, Any] | None:
    match block:
        case {"type": "text", "text": text}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "url", "url": url}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "base64", "data": data, **source}}:
            kind = source.get("media_type", "image/jpeg")
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    return None


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input", {})).decode()
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("content")
    parts = [part for block in given if (part := _part(block))] if isinstance(given, list) else []
    is_text = all(isinstance(part.get("text"), str) for part in parts)
    content: Any = "".join(part["text"] for part in parts) if is_text else parts
    if isinstance(given, str):
        content = given
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content}


def _tools(members: Mapping[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if isinstance(tools := members.get("tools"), list):
        asked["tools"] = [_tool(tool) for tool in tools if isinstance(tool, dict)]
    match members.get("tool_choice"):
        case {"type": str(kind)} if kind in _CHOICES:
            asked["tool_choice"] = _CHOICES[kind]
    return asked


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": tool.get("name", ""), "description": tool.get("description", "")}
    return {"type": "function", "function": {**named, "parameters": tool.get("input_schema", {})}}


# OpenAI's responses.


_INPUT_ROLES: Final = frozenset({"user", "system", "developer"})
# Members that the chat request has in another form.
_TRANSLATED: Final = frozenset({"input", "instructions", "tools", "max_output_tokens", "reasoning"})


def _responses_chat(members: Mapping[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in members.items() if name not in _TRANSLATED}
    messages: list[dict[str, Any]] = []
    if "instructions" in members:
        text = members["instructions"]
        messages.append({"role": "system", "content": text if isinstance(text, str) else ""})
    given = members["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    asked["messages"] = _items(items, messages)
    tools = [
        {
            "type": "function",
            "function": {**_without(tool, "type"), "strict": tool.get("strict", True)},
        }
        for tool in members.get("tools", ())
        if tool.get("type") == "function"
    ]
    if tools:
        asked["tools"] = tools
    if "max_output_tokens" in members:
        asked["max_tokens"] = members["max_output_tokens"]
    if "effort" in (reasoning := members.get("reasoning", {})):
        asked["reasoning_effort"] = reasoning["effort"]
    return asked


def _items(items: Sequence[Mapping[str, Any]], before: Sequence[Message] = ()) -> list[Message]:
    """Return the messages of a response's items; an assistant's items become one message."""
    messages: list[dict[str, Any]] = [{**message} for message in before]
    for item in items:
        match item:
            case {"role": str(role), "content": str() | list()} if role in _INPUT_ROLES:
                parts = [_input_part(part) for part in _content(item)]
                messages.append({**_without(item, "type", "status"), "content": parts})
            case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
                result = output if isinstance(output, str) else list(map(_input_part, output))
                messages.append({"content": result, "role": "tool", "tool_call_id": call_id})
            case _:
                if not messages or messages[-1].get("role") != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                _add_to_answer(messages[-1], item)
    return [*messages]


def _add_to_answer(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    match item:
        case {"type": "message", "role": "assistant"}:
            texts = [_output_part(part) for part in _content(item)]
            message["content"] = [*message["content"], *texts]
        case {"type": "function_call", "call_id": str(call_id), "name": str(name)}:
            function = {"arguments": item["arguments"], "name": name}
            call = {"function": function, "id": call_id, "type": "function"}
            message.setdefault("tool_calls", []).append(call)
        case {"type": "reasoning", "summary": list(), "content": [{"text": str(text)}, *_]}:
            message["reasoning_content"] = text
        case _:
            raise _Untranslated


def _content(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = item["content"]
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _input_part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "input_text", "text": text}:
            return {"text": text, "type": "text"}
        case {"type": "input_image", "image_url": url}:
            return {"image_url": {"url": url}, "type": "image_url"}
    raise _Untranslated


def _output_part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "output_text" | "input_text", "text": str(text)}:
            return {"text": text, "type": "text"}
    raise _Untranslated


def _without(members: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name not in names}


# The parts of answers that clients send back.


# Next messages that begin differently, also where a tokenizer joins a newline with the next one.
_NEXT: Final = ("A", "\n1")

# The parts of an answer that a template may write differently.
AnswerKind = Literal["text", "reasoning", "calls"]


def answer_kind(reply: Message) -> AnswerKind:
    if reply.get("tool_calls"):
        return "calls"
    return "reasoning" if reply.get("reasoning_content") else "text"


def _text(message: Message) -> str:
    """Return the text of a message, joined if it has parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


# How programs write the arguments of a call that they have parsed: JavaScript, Python and Go, which
# sorts them. The first style that fits counts.
_WRITERS: Final[Mapping[str, Callable[[Any], str]]] = {
    "compact": partial(json.dumps, ensure_ascii=False, separators=(",", ":")),
    "spaced": partial(json.dumps, ensure_ascii=False),
    "ascii": json.dumps,
    "sorted": partial(json.dumps, ensure_ascii=False, separators=(",", ":"), sort_keys=True),
    "sorted spaced": partial(json.dumps, sort_keys=True),
}


def written_arguments(arguments: str) -> dict[str, str]:
    """Return the arguments of a call as clients may write them, by the name of the writer."""
    found = {"": arguments}
    with suppress(ValueError, RecursionError):
        read = json.loads(arguments)
        found |= {name: write(read) for name, write in _WRITERS.items()}
    return found


def _arguments(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls] if isinstance(calls, list) else []
    found = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return [arguments for arguments in found if isinstance(arguments, str)]


class Given(NamedTuple):
    kind: AnswerKind
    whole: int  # Hash of the text, 0 without any.
    trimmed: int  # Hash of the text without white space around it.
    has_reasoning: bool
    arguments: Mapping[int, str] = {}

    @classmethod
    def of(cls, reply: Message) -> Given:
        text, kind = _text(reply), answer_kind(reply)
        hashes = (hash(text), hash(text.strip())) if text else (0, 0)
        arguments: dict[int, str] = {}
        for given in _arguments(reply) if kind == "calls" else ():
            for writer, written in written_arguments(given).items():
                arguments.setdefault(hash(written), writer)
        return cls(kind, *hashes, bool(reply.get("reasoning_content")), arguments)


@dataclass(frozen=True, slots=True)
class SentBack:
    """The parts of an answer that a client sends back."""

    is_trimmed: bool = False
    has_reasoning: bool = False
    has_null: bool = False  # The content of an answer without text is null.
    writer: str = ""  # Of the arguments of calls; empty: they are sent back as they came.
    has_user_first: bool = False  # A user's text comes before the results of calls.

    def message(self, reply: Message) -> dict[str, Any]:
        """Return the assistant's message in the client's next request."""
        content = reply.get("content") or ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.is_trimmed:
            message["content"] = (
                content.strip()
                if isinstance(content, str)
                else [{**part, "text": part["text"].strip()} for part in content]
            )
        if not content and self.has_null:
            message["content"] = None
        if self.has_reasoning and (reasoning := reply.get("reasoning_content")):
            message["reasoning_content"] = reasoning
        if calls := reply.get("tool_calls"):
            message["tool_calls"] = [self._write(call) for call in calls] if self.writer else calls
        return message

    def _write(self, call: Message) -> Message:
        function = call["function"]
        written = written_arguments(function["arguments"])
        arguments = written.get(self.writer, function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    def after(self, given: Given, sent: Message, following: Message) -> SentBack:
        """Return the habits known once a client has sent back an answer and the next messages."""
        text, found = hash(_text(sent)), self
        if text in {given.whole, given.trimmed} and given.whole != given.trimmed:
            found = replace(found, is_trimmed=text == given.trimmed)
        if not given.whole:
            found = replace(found, has_null=sent.get("content") is None)
        if given.has_reasoning:
            found = replace(found, has_reasoning=bool(sent.get("reasoning_content")))
        writers = {given.arguments.get(hash(arguments)) for arguments in _arguments(sent)}
        if len(writers) == 1 and (writer := writers.pop()) is not None:
            found = replace(found, writer=writer)
        if given.kind == "calls":
            found = replace(found, has_user_first=following.get("role") == "user")
        return found


# Clients of Anthropic's API return the reasoning of answers; those of the others do not.
SENT_BACK: Final = {EndpointKind.MESSAGES: SentBack(has_reasoning=True)}


def next_messages(
    messages: Sequence[Message], answer: Message, *, has_user_first: bool = False
) -> Iterator[list[Message]]:
    """Yield the messages of two different next turns: results of the answer's calls, or a user."""
    for text in _NEXT:
        calls = answer.get("tool_calls") or ()
        results = [
            {"role": "tool", "tool_call_id": call.get("id"), "content": text} for call in calls
        ]
        user = {"role": "user", "content": text}
        yield [*messages, answer, *([user] if has_user_first or not results else []), *results]
