"""The llama-server endpoints that are forwarded, and the kind of work of each.

Endpoints that change an instance (POST /slots, /props, /lora-adapters) are not forwarded; the proxy
itself answers GET /slots, /metrics, /health and /v1/models for all instances.

Source: tools/server/server.cpp of llama.cpp, its list of routes; builds 10434 and 11434.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Final


class EndpointKind(Enum):
    """The kind of an endpoint's computation, and its API."""

    CHAT = auto()  # OpenAI's chat completions
    COMPLETION = auto()  # OpenAI's text completions
    LLAMA_COMPLETION = auto()  # llama-server's own completions
    MESSAGES = auto()  # Anthropic's messages
    RESPONSES = auto()  # OpenAI's responses
    INFILL = auto()  # llama-server's fill in the middle
    EMBED_OR_RERANK = auto()  # generates no token
    TRANSCRIPTION = auto()  # audio to text
    PROMPT = auto()  # needs no slot: render or count the prompt of a request
    INFO = auto()  # needs no slot: tokenise, read properties

    def __init__(self, _number: int) -> None:
        self.label = self.name.lower()  # in events
        self.takes_slot = self.name not in {"INFO", "PROMPT"}
        # Whether the response is generated text of a chat or completion.
        self.generates = self.takes_slot and self.name not in {"EMBED_OR_RERANK", "TRANSCRIPTION"}
        self.takes_variants = self.generates or self.name == "PROMPT"
        # Whether the body may be a multipart form; all endpoints take JSON.
        self.takes_forms = self.name == "TRANSCRIPTION"

    __hash__ = object.__hash__  # Enum's is written in Python, and kinds are looked up often


_POSTED: Final[Mapping[EndpointKind, Sequence[str]]] = {
    EndpointKind.CHAT: ("/chat/completions", "/v1/chat/completions"),
    EndpointKind.COMPLETION: ("/v1/completions",),
    EndpointKind.LLAMA_COMPLETION: ("/completion", "/completions"),
    EndpointKind.MESSAGES: ("/v1/messages",),
    EndpointKind.RESPONSES: ("/responses", "/v1/responses"),
    EndpointKind.INFILL: ("/infill",),
    EndpointKind.EMBED_OR_RERANK: (
        *("/embedding", "/embeddings", "/v1/embeddings"),
        *("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    ),
    EndpointKind.TRANSCRIPTION: ("/audio/transcriptions", "/v1/audio/transcriptions"),
    EndpointKind.PROMPT: (
        *("/apply-template", "/v1/messages/count_tokens"),
        *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        *("/responses/input_tokens", "/v1/responses/input_tokens"),
    ),
    EndpointKind.INFO: ("/detokenize", "/tokenize"),
}
_KINDS: Final = {path: kind for kind, paths in _POSTED.items() for path in paths}
ENDPOINTS: Final[Mapping[str, Mapping[str, EndpointKind]]] = {
    "GET": {"/lora-adapters": EndpointKind.INFO, "/props": EndpointKind.INFO},
    "POST": {path: _KINDS[path] for path in sorted(_KINDS)},
}


@lru_cache(maxsize=64)
def endpoint_kind(method: str, path: str) -> EndpointKind:
    """Return the kind of an endpoint in the table; HEAD counts as GET."""
    return ENDPOINTS["GET" if method == "HEAD" else method][path]
