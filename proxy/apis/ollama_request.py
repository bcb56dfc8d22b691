"""Translates a request of Ollama's API for an engine: one function for each endpoint. Pure.

A function returns None for a request without a prompt, which only loads its model. Messages are
translated to OpenAI's chat API. In Ollama's API, a call of a tool has no id; a result names the
tool, or follows its call. Options for loading a model (`num_ctx`, `num_gpu`) belong in
`corral.toml` and are ignored: most clients send some of them with every request.

Source: Ollama, api/types.go (Options, Runner) and docs/modelfile.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import orjson

from proxy.errors import BadRequest
from proxy.request.request import KEEP_ALIVE
from proxy.upstream.endpoint_kinds import EndpointKind

# Types of images by the beginning of their base64.
_IMAGE_TYPES: Final = MappingProxyType(
    {"iVBORw0KGgo": "image/png", "R0lGOD": "image/gif", "UklGR": "image/webp", "Qk": "image/bmp"}
)
_JPEG: Final = "image/jpeg"


def messages_of(given: object) -> list[dict[str, Any]]:
    """Return the messages; raises BadRequest."""
    if not isinstance(given, list):
        raise BadRequest("the member messages must be a list")
    calls: deque[tuple[str, str]] = deque()
    return [
        _message(number, _object(message, "message"), calls) for number, message in enumerate(given)
    ]


def user_message(prompt: object, images: object) -> dict[str, Any]:
    return {"role": "user", "content": _content(prompt, images)}


def _message(
    number: int, given: Mapping[str, Any], calls: deque[tuple[str, str]]
) -> dict[str, Any]:
    """Return a message; `calls` has the ids and names of calls that have no result yet."""
    message = {
        "role": given.get("role"),
        "content": _content(given.get("content"), given.get("images")),
    }
    if given.get("role") == "tool":
        return {**message, **_call_reference(given, calls)}
    if thinking := given.get("thinking"):
        message["reasoning_content"] = thinking
    if called := _list(given, "tool_calls"):
        made = [
            _call(_object(call, "tool call"), f"call_{number}_{at}")
            for at, call in enumerate(called)
        ]
        calls.clear()
        calls.extend((call["id"], call["function"]["name"]) for call in made)
        message["tool_calls"] = made
    return message


def _call_reference(given: Mapping[str, Any], calls: deque[tuple[str, str]]) -> dict[str, Any]:
    """Return the members that name a result's call."""
    wanted = given.get("tool_call_id")
    name = given.get("tool_name") or given.get("name")
    fitting = (call for call in calls if name in {call[1], None} and wanted in {call[0], None})
    if found := next(fitting, None):
        calls.remove(found)
    call_id, called = found or (wanted or "", name)
    return {"tool_call_id": call_id, **({"name": name or called} if name or called else {})}


def _call(given: Mapping[str, Any], new_id: str) -> dict[str, Any]:
    function = _object(given.get("function"), "function of a tool call")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {
        "id": given.get("id") or new_id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": text},
    }


def _content(text: object, images: object) -> object:
    if not images:
        return "" if text is None else text
    if not isinstance(images, list):
        raise BadRequest("the member images must be a list")
    parts: list[dict[str, Any]] = [{"type": "text", "text": text or ""}]
    for image in images:
        if not isinstance(image, str):
            raise BadRequest("an image must be a string in base64")
        kinds = (kind for start, kind in _IMAGE_TYPES.items() if image.startswith(start))
        url = f"data:{next(kinds, _JPEG)};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name) or []
    if not isinstance(found, list):
        raise BadRequest(f"the member {name} must be a list")
    return found


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"each {what} must be an object")
    return value


_SAMPLERS: Final = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")
_PENALTIES: Final = ("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty")
_MIROSTAT: Final = ("mirostat", "mirostat_tau", "mirostat_eta")
# The engine's member for each option.
_NAMES: Final = MappingProxyType(
    {name: name for name in (*_SAMPLERS, *_PENALTIES, *_MIROSTAT)} | {"num_keep": "n_keep"}
)
_LIMIT: Final = "num_predict"


def options_of(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that have a value; raises BadRequest."""
    options = members.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise BadRequest("the member options must be an object")
    return {name: value for name, value in options.items() if value is not None}


def sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members for these options; the engine refuses wrong values."""
    asked = {_NAMES[name]: value for name, value in options.items() if name in _NAMES}
    limit = options.get(_LIMIT)
    if isinstance(limit, int) and limit <= 0:  # until the model ends or the context is full
        return asked
    return asked if limit is None else {**asked, "n_predict": limit}


def ignored_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in options if name not in _NAMES and name != _LIMIT)


def schema_of(members: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema of `format`, None for any text; raises BadRequest."""
    match members.get("format"):
        case None | "":
            return None
        case "json":
            return {"type": "object"}
        case dict(schema):
            return schema
    raise BadRequest('the member format must be "json" or a JSON schema')


def template_options(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the member that chat templates read for how to think."""
    match members.get("think"):
        case bool(is_on):
            return {"chat_template_kwargs": {"enable_thinking": is_on}}
        case str(effort) if effort:
            named = {"enable_thinking": True, "reasoning_effort": effort}
            return {"chat_template_kwargs": named}
    return {}


_EMBEDDINGS: Final = "/v1/embeddings"
# Members of Ollama's request for text that have no meaning here.
_UNUSED: Final = ("template", "context", "shift", "truncate")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    path: str
    kind: EndpointKind
    members: dict[str, Any]  # the body without the model
    ignored: tuple[str, ...] = ()  # names of the client's members and options that have no effect
    dimensions: int | None = None  # the length to which a vector is cut, or None


Translate = Callable[[Mapping[str, Any]], EngineRequest | None]


def chat(members: Mapping[str, Any]) -> EngineRequest | None:
    """Translate `/api/chat`; raises BadRequest, as the other functions do."""
    if not members.get("messages"):
        return None
    return _chat(members, messages_of(members["messages"]))


def generate(members: Mapping[str, Any]) -> EngineRequest | None:
    prompt, images = members.get("prompt"), members.get("images")
    if not (prompt or images or members.get("suffix")):
        return None
    if not isinstance(prompt, str | None):
        raise BadRequest("the member prompt must be a string")
    if members.get("raw") is True:
        return _completion(members, "/completion", EndpointKind.LLAMA_COMPLETION, prompt=prompt)
    if suffix := members.get("suffix"):
        filled = {"input_prefix": prompt or "", "input_suffix": suffix}
        return _completion(members, "/infill", EndpointKind.INFILL, **filled)
    system = members.get("system")
    first = [{"role": "system", "content": system}] if system else []
    return _chat(members, [*first, user_message(prompt, images)])


def embed(members: Mapping[str, Any]) -> EngineRequest | None:
    if not (given := members.get("input")):
        return None
    dimensions = members.get("dimensions")
    if dimensions is not None and (not isinstance(dimensions, int) or dimensions < 0):
        raise BadRequest("the member dimensions must be a whole number")
    return _embeddings(members, given, dimensions or None)


def embeddings(members: Mapping[str, Any]) -> EngineRequest | None:
    """Translate the older endpoint `/api/embeddings`: one text."""
    return _embeddings(members, given) if (given := members.get("prompt")) else None


def _chat(members: Mapping[str, Any], messages: list[dict[str, Any]]) -> EngineRequest:
    options = options_of(members)
    asked = {
        **sampling(options),
        **template_options(members),
        **_pick_members(members, KEEP_ALIVE, "tools", "logprobs", "top_logprobs"),
        "messages": messages,
        "stream": _is_stream(members),
    }
    if asked["stream"]:
        asked["stream_options"] = {"include_usage": True}
    if (schema := schema_of(members)) is not None:
        named = {"name": "output", "strict": True, "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    path = "/v1/chat/completions"
    return EngineRequest(path, EndpointKind.CHAT, asked, _ignored_members(members, options))


def _completion(
    members: Mapping[str, Any], path: str, kind: EndpointKind, **prompt: object
) -> EngineRequest:
    options = options_of(members)
    asked = {
        **sampling(options),
        **_pick_members(members, KEEP_ALIVE),
        **prompt,
        "stream": _is_stream(members),
    }
    if (schema := schema_of(members)) is not None:
        asked["json_schema"] = schema
    return EngineRequest(path, kind, asked, _ignored_members(members, options))


def _embeddings(
    members: Mapping[str, Any], texts: object, dimensions: int | None = None
) -> EngineRequest:
    asked = {"input": texts, **_pick_members(members, KEEP_ALIVE)}
    unused = _ignored_members(members, options_of(members))
    return EngineRequest(_EMBEDDINGS, EndpointKind.EMBED_OR_RERANK, asked, unused, dimensions)


def _is_stream(members: Mapping[str, Any]) -> bool:
    return members.get("stream") is not False


def _pick_members(members: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: members[name] for name in names if members.get(name) is not None}


def _ignored_members(members: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, ...]:
    unused = [name for name in _UNUSED if members.get(name)]
    return (*ignored_options(options), *unused)
