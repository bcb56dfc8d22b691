"""Every page of llama-server that is passed on, and what kind of work it is for an instance.

Pages that change an instance (POST /slots, /props, /lora-adapters) are not in the table; nor are
those that the proxy answers for all instances (GET /slots, /metrics, /health, /v1/models).

Source: tools/server/server.cpp of llama.cpp, its list of routes; builds 10434 and 11434.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final


class EndpointKind(Enum):
    """What a page makes an instance do, and in whose words."""

    CHAT = auto()
    """OpenAI's chat completion."""
    COMPLETION = auto()
    """OpenAI's text completion."""
    LLAMA_COMPLETION = auto()
    """llama-server's own completion."""
    MESSAGES = auto()
    """Anthropic's messages."""
    RESPONSES = auto()
    """OpenAI's responses."""
    INFILL = auto()
    """llama-server's fill in the middle."""
    EMBED_OR_RERANK = auto()
    """Computed in one go, without a token generated: embeddings, reranking."""
    TRANSCRIPTION = auto()
    """A sound file to be written down."""
    INFO = auto()
    """Answered without a slot: tokenising, templates, counting, properties."""

    @property
    def takes_slot(self) -> bool:
        """Return whether an instance needs one of its slots for it."""
        return self is not EndpointKind.INFO

    @property
    def generates(self) -> bool:
        """Return whether an instance writes text for it."""
        return self not in {
            EndpointKind.EMBED_OR_RERANK,
            EndpointKind.TRANSCRIPTION,
            EndpointKind.INFO,
        }

    @property
    def takes_forms(self) -> bool:
        """Return whether its pages take a multipart form; all take JSON."""
        return self is EndpointKind.TRANSCRIPTION


ENDPOINTS: Final[Mapping[str, Mapping[str, EndpointKind]]] = MappingProxyType(
    {
        "GET": {"/props": EndpointKind.INFO},
        "POST": {
            "/apply-template": EndpointKind.INFO,
            "/chat/completions": EndpointKind.CHAT,
            "/completion": EndpointKind.LLAMA_COMPLETION,
            "/completions": EndpointKind.LLAMA_COMPLETION,
            "/detokenize": EndpointKind.INFO,
            "/embedding": EndpointKind.EMBED_OR_RERANK,
            "/embeddings": EndpointKind.EMBED_OR_RERANK,
            "/infill": EndpointKind.INFILL,
            "/rerank": EndpointKind.EMBED_OR_RERANK,
            "/reranking": EndpointKind.EMBED_OR_RERANK,
            "/responses": EndpointKind.RESPONSES,
            "/tokenize": EndpointKind.INFO,
            "/v1/audio/transcriptions": EndpointKind.TRANSCRIPTION,
            "/v1/chat/completions": EndpointKind.CHAT,
            "/v1/completions": EndpointKind.COMPLETION,
            "/v1/embeddings": EndpointKind.EMBED_OR_RERANK,
            "/v1/messages": EndpointKind.MESSAGES,
            "/v1/messages/count_tokens": EndpointKind.INFO,
            "/v1/rerank": EndpointKind.EMBED_OR_RERANK,
            "/v1/reranking": EndpointKind.EMBED_OR_RERANK,
            "/v1/responses": EndpointKind.RESPONSES,
        },
    }
)


def endpoint_kind(method: str, path: str) -> EndpointKind:
    """Return the kind of a page of the table; HEAD asks for what GET would."""
    return ENDPOINTS["GET" if method == "HEAD" else method][path]
