"""Translates Ollama's API for an engine: a function for each endpoint's request, and the answers.

A function returns None for a request without a prompt, which only loads its model. Messages are
translated to OpenAI's chat API. In Ollama's API, a call of a tool has no id; a result names the
tool, or follows its call. Options for loading a model (`num_ctx`, `num_gpu`) belong in
`corral.toml` and are ignored: most clients send some of them with every request.

The answer, a chat completion or llama-server's own completion, becomes JSON in lines, or one line.

Source: Ollama, api/types.go (Options, Runner) and docs/modelfile.md.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson
from multidict import CIMultiDict

from proxy.common.headers import is_event_stream
from proxy.errors import BadRequest
from proxy.forward.assemblers import ToolCall, chat_piece
from proxy.forward.response import EventTransform
from proxy.http.api_formats import LINES, ollama_error
from proxy.request.request import KEEP_ALIVE
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE, data_of, members_of

# Types of images by the beginning of their base64.
_IMAGE_TYPES: Final = MappingProxyType(
    {"iVBORw0KGgo": "image/png", "R0lGOD": "image/gif", "UklGR": "image/webp", "Qk": "image/bmp"}
)


def messages_of(given: object) -> list[dict[str, Any]]:
    """Return the messages; raises BadRequest."""
    if not isinstance(given, list):
        raise BadRequest("the member messages must be a list")
    calls: deque[tuple[str, str]] = deque()
    objects = (_object(message, "message") for message in given)
    return [_message(number, message, calls) for number, message in enumerate(objects)]


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
        objects = enumerate(_object(call, "tool call") for call in called)
        made = [_call(call, f"call_{number}_{at}") for at, call in objects]
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
        url = f"data:{next(kinds, 'image/jpeg')};base64,{image}"
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
            return {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": effort}}
    return {}


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
        return _generation(members, "/completion", EndpointKind.LLAMA_COMPLETION, prompt=prompt)
    if suffix := members.get("suffix"):
        filled = {"input_prefix": prompt or "", "input_suffix": suffix}
        return _generation(members, "/infill", EndpointKind.INFILL, **filled)
    system = members.get("system")
    first = [{"role": "system", "content": system}] if system else []
    return _chat(members, [*first, {"role": "user", "content": _content(prompt, images)}])


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
    asked = {
        **template_options(members),
        **_pick_members(members, "tools", "logprobs", "top_logprobs"),
        "messages": messages,
    }
    if members.get("stream") is not False:
        asked["stream_options"] = {"include_usage": True}
    return _generation(members, "/v1/chat/completions", EndpointKind.CHAT, **asked)


def _generation(
    members: Mapping[str, Any], path: str, kind: EndpointKind, **given: object
) -> EngineRequest:
    options = options_of(members)
    is_stream = members.get("stream") is not False
    kept = _pick_members(members, KEEP_ALIVE)
    asked = {**sampling(options), **kept, **given, "stream": is_stream}
    if (schema := schema_of(members)) is not None:
        asked["json_schema"] = schema
    return EngineRequest(path, kind, asked, _ignored_members(members, options))


def _embeddings(
    members: Mapping[str, Any], texts: object, dimensions: int | None = None
) -> EngineRequest:
    asked = {"input": texts, **_pick_members(members, KEEP_ALIVE)}
    unused = _ignored_members(members, options_of(members))
    return EngineRequest("/v1/embeddings", EndpointKind.EMBED_OR_RERANK, asked, unused, dimensions)


def _pick_members(members: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: members[name] for name in names if members.get(name) is not None}


def _ignored_members(members: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, ...]:
    unknown = [name for name in options if name not in _NAMES and name != _LIMIT]
    return (*unknown, *(name for name in _UNUSED if members.get(name)))


_NS: Final = 1_000_000  # in a millisecond


# The members that a piece adds: `content`, `thinking`, `tool_calls` and `logprobs`, if not empty.
Delta = dict[str, Any]
Shape = Callable[[Delta], dict[str, Any]]


def as_message(delta: Delta) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", **delta}
    logprobs = message.pop("logprobs", None)
    return {"message": message, "logprobs": logprobs} if logprobs else {"message": message}


def as_response(delta: Delta) -> dict[str, Any]:
    others = {name: value for name, value in delta.items() if name != "content"}
    return {"response": delta.get("content", ""), **others}


def _called_json(call: ToolCall, index: int) -> dict[str, Any]:
    """Return a call; its arguments are empty if it was cut."""
    try:
        arguments = orjson.loads(call.arguments or b"{}")
    except orjson.JSONDecodeError:
        arguments = {}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def header(model: str) -> dict[str, Any]:
    now = datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first values of a vector, normalised to length 1; unchanged if it has no more."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]


# Names of members and options of the request that have no effect.
IGNORED: Final = "X-Corral-Ignored"


class OllamaAnswer(EventTransform):
    """Translates an answer for an endpoint; `empty` has the members of an empty answer.

    `take` sets the request and the client's `model`.
    """

    def __init__(self, empty: Mapping[str, Any]) -> None:
        super().__init__()
        self.empty = empty
        self.model = ""
        self._asked: EngineRequest | None = None
        self._began_at_s = time.monotonic()
        self._queued_s = 0.0

    def take(self, model: str, asked: EngineRequest | None) -> None:
        """Note the model and the engine's request; None if the request only loads the model."""
        self.model, self._asked = model, asked

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        """Translate a whole answer; raises as `whole` does."""
        raise NotImplementedError

    def durations(self) -> Mapping[str, int]:
        total_s = time.monotonic() - self._began_at_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(self._queued_s * 1e9)}

    def ping(self) -> bytes:
        return self._encode_line(self.empty, {"done": False})

    def note_lease(self, lease: Lease) -> None:
        self._queued_s = lease.queued_s

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002 (of any status)
        if is_event_stream(headers):
            headers["Content-Type"] = LINES
        if self._asked and self._asked.ignored:
            names = ", ".join(ascii(name)[1:-1] for name in self._asked.ignored)
            headers[IGNORED] = names[:512]

    def whole(self, status: int, body: bytes) -> bytes:
        return self.translate_whole(orjson.loads(body)) if status == HTTPStatus.OK else body

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:
        self.begin(status, headers)
        return body

    def _encode_line(self, *members: Mapping[str, Any]) -> bytes:
        line = header(self.model)
        for more in members:
            line.update(more)
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


class AnswerLines(OllamaAnswer):
    """Writes the lines of one answer; `is_over` is True after the last line.

    Args:
        shape: Returns the endpoint's members for a delta.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape({}))
        self.is_over = False
        self._shape = shape
        self._reason = "stop"
        self._calls: dict[int, ToolCall] = {}
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        delta = self._add(chat_piece(body) if "choices" in body else {**body, "stop": True})
        return self._encode_line(self._shape(delta | self._called()), self._last_members())

    def event(self, event: bytes) -> bytes:
        if self.is_over:
            return b""
        if data_of(event) == DONE:
            return self._end()
        if (piece := members_of(event)) is None:  # a comment
            return b""
        if "error" in piece:
            self.is_over = True
            error = piece["error"]
            return ollama_error(error if isinstance(error, dict) else {"message": error})
        delta = self._add(piece)
        line = self._encode_line(self._shape(delta), {"done": False}) if delta else b""
        return line + self._end() if piece.get("stop") is True else line

    def _add(self, piece: Mapping[str, Any]) -> Delta:
        """Take a piece; raises LookupError, TypeError or AttributeError for another format."""
        self._usage = piece.get("usage") or self._usage
        self._timings = piece.get("timings") or self._timings
        if piece.get("stop") is True:
            self._reason = "length" if piece.get("stop_type") == "limit" else "stop"
            self._usage = {
                "prompt_tokens": piece.get("tokens_evaluated"),
                "completion_tokens": piece.get("tokens_predicted"),
            }
        if "choices" not in piece:
            return {"content": text} if (text := piece.get("content")) else {}
        for choice in piece["choices"]:
            if choice.get("finish_reason") == "length":
                self._reason = "length"
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or ():
                self._calls.setdefault(call["index"], ToolCall()).add(call)
            added = {
                "content": delta.get("content"),
                "thinking": delta.get("reasoning_content"),
                "logprobs": (choice.get("logprobs") or {}).get("content"),
            }
            return {name: value for name, value in added.items() if value}
        return {}

    def _called(self) -> Delta:
        calls = [_called_json(call, index) for index, call in sorted(self._calls.items())]
        return {"tool_calls": calls} if calls else {}

    def _end(self) -> bytes:
        self.is_over = True
        called = self._called()
        line = self._encode_line(self._shape(called), {"done": False}) if called else b""
        return line + self._encode_line(self.empty, self._last_members())

    def _last_members(self) -> dict[str, Any]:
        usage, timings = self._usage, self._timings
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            prompt = timings.get("cache_n", 0) + timings.get("prompt_n", 0)
        decoded = usage.get("completion_tokens")
        return {
            **self.durations(),
            "done": True,
            "done_reason": self._reason,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0) * _NS),
            "eval_count": timings.get("predicted_n", 0) if decoded is None else decoded,
            "eval_duration": int(timings.get("predicted_ms", 0) * _NS),
        }


class VectorAnswer(OllamaAnswer):
    """Translates vectors for `/api/embed`, and the single one of the older `/api/embeddings`."""

    def __init__(self, member: Literal["embeddings", "embedding"]) -> None:
        super().__init__({member: []})

    def translate_whole(self, body: Mapping[str, Any]) -> bytes:
        dimensions = self._asked.dimensions if self._asked else None
        ordered = sorted(body["data"], key=lambda item: int(item["index"]))  # as their texts
        vectors = [_cut(item["embedding"], dimensions) for item in ordered]
        if "embedding" in self.empty:
            (vector,) = vectors
            return orjson.dumps({"embedding": vector})
        tokens = int((body.get("usage") or {}).get("prompt_tokens", 0))
        counted = {**self.durations(), "prompt_eval_count": tokens}
        return orjson.dumps({"model": self.model, "embeddings": vectors, **counted})


# How each endpoint is answered and translated.
TRANSLATED: Final[Mapping[str, tuple[Callable[[], OllamaAnswer], Translate]]] = {
    "/api/chat": (lambda: AnswerLines(as_message), chat),
    "/api/generate": (lambda: AnswerLines(as_response), generate),
    "/api/embed": (lambda: VectorAnswer("embeddings"), embed),
    "/api/embeddings": (lambda: VectorAnswer("embedding"), embeddings),
}
