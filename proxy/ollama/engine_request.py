"""What an engine is asked for a request of Ollama's API: one function for each endpoint. Pure.

They return None for a request that only loads its model: one without a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.keep_alive import MEMBER as KEEP_ALIVE
from proxy.ollama.messages import messages_of, user_message
from proxy.ollama.options import ignored, options_of, sampling, schema_of, template_options

_EMBEDDINGS: Final = "/v1/embeddings"
# Of Ollama's request for text, what has no meaning here.
_UNUSED: Final = ("template", "context", "shift", "truncate")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request.

    Attributes:
        members: Without the model.
        ignored: Names of what the client gave and nothing was made of.
        dimensions: To which a vector is cut, or None.
    """

    path: str
    kind: EndpointKind
    members: dict[str, Any]
    ignored: tuple[str, ...] = ()
    dimensions: int | None = None


Translate = Callable[[Mapping[str, Any]], EngineRequest | None]


def chat(members: Mapping[str, Any]) -> EngineRequest | None:
    """Raises BadRequest, as the others do."""
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
    """One text or several."""
    if not (given := members.get("input")):
        return None
    dimensions = members.get("dimensions")
    if dimensions is not None and (not isinstance(dimensions, int) or dimensions < 0):
        raise BadRequest("the member dimensions must be a whole number")
    return _embeddings(members, given, dimensions or None)


def embeddings(members: Mapping[str, Any]) -> EngineRequest | None:
    """One text, at the older endpoint."""
    return _embeddings(members, given) if (given := members.get("prompt")) else None


def _chat(members: Mapping[str, Any], messages: list[dict[str, Any]]) -> EngineRequest:
    options = options_of(members)
    asked = {
        **sampling(options),
        **template_options(members),
        **_kept(members, KEEP_ALIVE, "tools", "logprobs", "top_logprobs"),
        "messages": messages,
        "stream": _is_stream(members),
    }
    if asked["stream"]:
        asked["stream_options"] = {"include_usage": True}
    if (schema := schema_of(members)) is not None:
        named = {"name": "output", "strict": True, "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    path = "/v1/chat/completions"
    return EngineRequest(path, EndpointKind.CHAT, asked, _ignored(members, options))


def _completion(
    members: Mapping[str, Any], path: str, kind: EndpointKind, **prompt: object
) -> EngineRequest:
    options = options_of(members)
    asked = {
        **sampling(options),
        **_kept(members, KEEP_ALIVE),
        **prompt,
        "stream": _is_stream(members),
    }
    if (schema := schema_of(members)) is not None:
        asked["json_schema"] = schema
    return EngineRequest(path, kind, asked, _ignored(members, options))


def _embeddings(
    members: Mapping[str, Any], texts: object, dimensions: int | None = None
) -> EngineRequest:
    asked = {"input": texts, **_kept(members, KEEP_ALIVE)}
    unused = _ignored(members, options_of(members))
    return EngineRequest(_EMBEDDINGS, EndpointKind.EMBED_OR_RERANK, asked, unused, dimensions)


def _is_stream(members: Mapping[str, Any]) -> bool:
    return members.get("stream") is not False


def _kept(members: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: members[name] for name in names if members.get(name) is not None}


def _ignored(members: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, ...]:
    unused = [name for name in _UNUSED if members.get(name)]
    return (*ignored(options), *unused)
