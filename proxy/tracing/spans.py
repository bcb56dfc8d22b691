"""From the figures of a request to its spans and their attributes. Pure.

Attributes have no text of a client but the names of its model and of its key. Source: OpenTelemetry
semantic conventions, "HTTP server spans" and "Generative AI client spans" (gen_ai is in
development); what they do not name begins with `corral.`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Attributes = Mapping[str, str | bool | int | float]

# Phases in their order; the client's own pauses are part of `decode`.
_BEFORE_TOKENS: Final = ("queued", "evict", "load", "prefill")
_SPAN_NAMES: Final = {"queued": "queue"}
_METHODS: Final = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)
_OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completion": "text_completion",
    "llama_completion": "text_completion",
    "infill": "text_completion",
    "embed_or_rerank": "embeddings",
}
# A field of `request.finished`, and the attribute that it becomes.
_ATTRIBUTES: Final = {
    "path": "http.route",
    "status": "http.response.status_code",
    "code": "error.type",
    "model": "gen_ai.response.model",
    "streamed": "gen_ai.request.stream",
    "decoded_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "request": "corral.request.id",
    "client": "corral.client",
    "instance": "corral.instance",
    "slot": "corral.slot",
    "priority": "corral.priority",
    "attempts": "corral.attempts",
    "cancelled": "corral.cancelled_by",
    "expected_cached_tokens": "corral.expected_cached_tokens",
    "stalled_ms": "corral.stalled_ms",
}
_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True)
class Phase:
    """A child span; in milliseconds after the beginning of the request."""

    name: str
    begin_ms: float
    end_ms: float


def method_of(method: str) -> str:
    """A method as an attribute: what a client invented is `_OTHER`."""
    return method if method in _METHODS else "_OTHER"


def span_name(method: str, fields: Mapping[str, Any]) -> str:
    name = "HTTP" if method == "_OTHER" else method
    return f"{name} {fields['path']}" if fields.get("path") else name


def attributes(fields: Mapping[str, Any]) -> Attributes:
    """Return the attributes of a request's span."""
    found = {
        name: fields[field] for field, name in _ATTRIBUTES.items() if fields.get(field) is not None
    }
    kind, model = fields.get("kind"), fields.get("fallback_for") or fields.get("model")
    if kind:
        found["gen_ai.operation.name"] = _OPERATIONS.get(kind, kind)
        found["gen_ai.provider.name"] = "llama.cpp"
    if model:
        found["gen_ai.request.model"] = model
    if fields.get("prompt_tokens") is not None:
        prompt_tokens = fields["prompt_tokens"] + (fields["cached_tokens"] or 0)
        found["gen_ai.usage.input_tokens"] = prompt_tokens
    if fields.get("first_token_ms") is not None:
        found["gen_ai.response.time_to_first_chunk"] = round(fields["first_token_ms"] / 1000, 4)
    return found


def is_error(fields: Mapping[str, Any]) -> bool:
    """Whether the request failed by our fault; a client's mistake is not an error of a server."""
    return (fields["status"] or 0) >= _SERVER_ERROR


def phases(fields: Mapping[str, Any]) -> Iterator[Phase]:
    """Yield the phases that took any time, one after another, as the request passed them.

    A phase that a retry repeated is one span, of the time of both.
    """
    waits_ms = [(name, fields[f"{name}_ms"]) for name in _BEFORE_TOKENS]
    decode_ms = fields["decode_ms"] + fields["stalled_ms"] if fields["decode_ms"] else 0.0
    before_ms = sum(took_ms for _, took_ms in waits_ms)
    decode_at_ms = _decode_at_ms(fields, decode_ms, before_ms)
    at_ms = max(0.0, decode_at_ms - before_ms)
    for name, took_ms in (*waits_ms, ("decode", decode_ms)):
        if took_ms:
            yield Phase(_SPAN_NAMES.get(name, name), at_ms, at_ms + took_ms)
        at_ms += took_ms


def _decode_at_ms(fields: Mapping[str, Any], decode_ms: float, before_ms: float) -> float:
    """When the first token came: by its own time where it had one, as late as it can be at most."""
    if not decode_ms:
        return before_ms
    latest_ms = float(fields["duration_ms"]) - decode_ms
    known_ms = fields.get("first_token_ms")
    return max(before_ms, latest_ms if known_ms is None else min(known_ms, latest_ms))
