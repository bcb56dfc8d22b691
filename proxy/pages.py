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


class Kind(Enum):
    """What a page makes an instance do, and in whose words."""

    CHAT = auto()
    """OpenAI's chat completion."""
    COMPLETION = auto()
    """OpenAI's text completion."""
    NATIVE = auto()
    """llama-server's own completion."""
    MESSAGES = auto()
    """Anthropic's messages."""
    RESPONSES = auto()
    """OpenAI's responses."""
    INFILL = auto()
    """llama-server's fill in the middle."""
    BATCH = auto()
    """Computed in one go, without a token generated: embeddings, reranking."""
    SPEECH = auto()
    """A sound file to be written down."""
    LOOK = auto()
    """Answered without a slot: tokenising, templates, counting, properties."""

    @property
    def takes_slot(self) -> bool:
        """Return whether an instance needs one of its slots for it."""
        return self is not Kind.LOOK

    @property
    def generates(self) -> bool:
        """Return whether an instance writes text for it."""
        return self not in {Kind.BATCH, Kind.SPEECH, Kind.LOOK}

    @property
    def takes_forms(self) -> bool:
        """Return whether its pages take a multipart form; all take JSON."""
        return self is Kind.SPEECH


PASSED: Final[Mapping[str, Mapping[str, Kind]]] = MappingProxyType(
    {
        "GET": {"/props": Kind.LOOK},
        "POST": {
            "/apply-template": Kind.LOOK,
            "/chat/completions": Kind.CHAT,
            "/completion": Kind.NATIVE,
            "/completions": Kind.NATIVE,
            "/detokenize": Kind.LOOK,
            "/embedding": Kind.BATCH,
            "/embeddings": Kind.BATCH,
            "/infill": Kind.INFILL,
            "/rerank": Kind.BATCH,
            "/reranking": Kind.BATCH,
            "/responses": Kind.RESPONSES,
            "/tokenize": Kind.LOOK,
            "/v1/audio/transcriptions": Kind.SPEECH,
            "/v1/chat/completions": Kind.CHAT,
            "/v1/completions": Kind.COMPLETION,
            "/v1/embeddings": Kind.BATCH,
            "/v1/messages": Kind.MESSAGES,
            "/v1/messages/count_tokens": Kind.LOOK,
            "/v1/rerank": Kind.BATCH,
            "/v1/reranking": Kind.BATCH,
            "/v1/responses": Kind.RESPONSES,
        },
    }
)


def kind_of(method: str, path: str) -> Kind:
    """Return the kind of a page of the table; HEAD asks for what GET would."""
    return PASSED["GET" if method == "HEAD" else method][path]
