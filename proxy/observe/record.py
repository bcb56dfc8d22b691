"""The record of one request, and the event at its end.

    request.finished    a model got it: answered, broken off, or its client disconnected (499)
    request.rejected    no model got it
    upstream.failed     an instance failed; in addition to the other two

The proxy's own endpoints are logged only when rejected, because of health probes. `RequestTrace` is
for code that must not import OpenTelemetry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

from aiohttp import web
from multidict import CIMultiDict

from proxy.errors import ProxyError, RequestCancelled
from proxy.observe.cache_finding import CacheFinding
from proxy.observe.timeline import Timeline
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.timings import Timings


class RequestTrace(Protocol):
    """The trace that a request belongs to."""

    def pass_on(self, headers: CIMultiDict[str]) -> None:
        """Add it to the headers of a request to an instance or a node."""

    def end(self, name: str, fields: Mapping[str, object]) -> None:
        """Send the spans of a request if `name` is its last event."""


class Tracer(Protocol):
    """Begins traces; `close` sends the remaining ones within half a second."""

    def begin(self, request: web.BaseRequest) -> RequestTrace: ...

    def close(self) -> None: ...


CLIENT_GONE: Final = 499
# Limit for texts in the log that may quote a client.
_QUOTABLE_MAX_CHARACTERS: Final = 400


class Emit(Protocol):
    """Receives an event with all its fields; must not fail and must not block."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


def discard(_name: str, /, **_fields: object) -> None:
    """An `Emit` that ignores events."""


def shorten_for_log(text: str) -> str:
    """Return a client's text for the log: shortened, control characters escaped."""
    shown = text[:_QUOTABLE_MAX_CHARACTERS]
    escaped = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown)
    return escaped + ("…" if shown != text else "")


class AccessRecord:
    """The record of one request, filled in as the request proceeds.

    Attributes:
        client: Name of its API key, or its address; None for endpoints that no instance answers.
        path: Path of the endpoint, None likewise.
        slot: The last `id_slot`; None if the engine chose.
        fallback_for: The model that the client named, if another model got the request.
        conversation: Number of its conversation in this process; None if the prompt identifies
            none.
        is_diverted: Whether it went to the other side of a trial because its own had no free slot.
        status: The client's status, that of the error that broke the response off, or 499 if the
            client disconnected; None before that.
        code: Code of the error that the client got or that broke its response off.
        continued: How often another engine continued the answer after the one before had ended.
        cache: The cache finding; None if the instance reports nothing.
        hides_others: Whether its client may not see other clients' cached tokens.
    """

    def __init__(self, request_id: str, timeline: Timeline) -> None:
        self.request_id = request_id
        self.client: str | None = None
        self.path: str | None = None
        self.model: str | None = None
        self.kind: EndpointKind | None = None
        self.is_stream: bool | None = None
        self.priority = "interactive"
        self.conversation: int | None = None
        self.is_diverted = False
        self.instance: str | None = None
        self.slot: int | None = None
        self.fallback_for: str | None = None
        self.status: int | None = None
        self.code: str | None = None
        self.bytes_out = 0
        self.continued = 0
        self.timings: Timings | None = None
        self.cache: CacheFinding | None = None
        self.timeline = timeline
        self.trace: RequestTrace | None = None
        self.hides_others = False
        self._attempts = 0
        self._expected_cached = 0
        self._first_byte_ms: float | None = None

    def set_instance(
        self,
        instance: str,
        expected_cached: int = 0,
        conversation: int | None = None,
    ) -> None:
        """Note that an instance got the request, with `expected_cached` prompt tokens cached."""
        self.instance = instance
        self.conversation = conversation
        self._attempts += 1
        self._expected_cached = expected_cached

    def part(self) -> AccessRecord:
        part = AccessRecord(self.request_id, self.timeline)
        part.model = self.model
        return part

    def add(self, part: AccessRecord) -> None:
        """Add the record of an upstream request that ended."""
        self._attempts = max(self._attempts, part._attempts)
        if part.timings:
            self._expected_cached += part._expected_cached if self.timings else 0
            self.timings = part.timings.plus(self.timings)
            self.cache = self.cache or part.cache

    def forget_answer(self) -> Timings | None:
        """Discard the answer's timings and return them, because another answer is requested."""
        discarded, self.timings = self.timings, None
        self.timeline.first_token_ms = None
        return discarded

    def count(self, chunk: bytes) -> None:
        if chunk and not self.bytes_out:
            # Whole tenths, rounded down like the times of the timeline.
            self._first_byte_ms = int((time.monotonic() - self.timeline.began_at_s) * 10_000) / 10
        self.bytes_out += len(chunk)

    def fail(self, error: ProxyError) -> None:
        self.status, self.code = error.status, error.code

    def figures(self) -> dict[str, Any]:
        """Return the fields of `request.finished` that explain the request until now."""
        return {
            "request": self.request_id,
            "model": self.model,
            "instance": self.instance,
            "first_token_ms": self.timeline.first_token_ms,
            "cache": self.cache.as_fields() if self.cache else None,
            **self.timeline.times_ms(self.timings.decode_ms if self.timings else None),
            **self._tokens(),
        }

    def emit(self, emit: Emit, rejected_by: ProxyError | None) -> None:
        times_ms = self.timeline.times_ms(self.timings.decode_ms if self.timings else None)
        if rejected_by and not self.instance:
            emit(
                "request.rejected",
                request=self.request_id,
                model=shorten_for_log(self.model) if self.model else None,
                client=self.client,
                path=shorten_for_log(self.path) if self.path else None,
                status=rejected_by.status,
                code=rejected_by.code,
                reason=shorten_for_log(rejected_by.message),
                cancelled=self._cancelled_by(),
                **times_ms,
            )
        elif self.model:
            emit(
                "request.finished",
                request=self.request_id,
                client=self.client,
                path=self.path,
                model=self.model,
                fallback_for=self.fallback_for,
                instance=self.instance,
                slot=self.slot,
                kind=self.kind.name.lower() if self.kind else None,
                streamed=self.is_stream,
                priority=self.priority,
                conversation=self.conversation,
                diverted=self.is_diverted or None,
                status=self.status,
                code=self.code,
                attempts=self._attempts,
                continued=self.continued or None,
                first_byte_ms=self._first_byte_ms,
                first_token_ms=self.timeline.first_token_ms,
                bytes_out=self.bytes_out,
                cancelled=self._cancelled_by(),
                cache_cause=self.cache.cause if self.cache else None,
                cache_tier=self.cache.tier if self.cache else None,
                cache=self.cache.as_fields() if self.cache else None,
                **times_ms,
                **self._tokens(),
            )

    def emit_upstream_failure(self, emit: Emit, error: ProxyError) -> None:
        """Emit that the instance failed this request, before or after its header."""
        emit(
            "upstream.failed",
            request=self.request_id,
            model=shorten_for_log(self.model) if self.model else None,
            instance=self.instance,
            phase="request" if self.status is None else "response",
            error=shorten_for_log(error.message),
        )

    def _cancelled_by(self) -> Literal["client", "operator"] | None:
        if self.status != CLIENT_GONE:
            return None
        return "operator" if self.code == RequestCancelled.code else "client"

    def _tokens(self) -> dict[str, float | None]:
        timings = self.timings
        return {
            "expected_cached_tokens": self._expected_cached if timings else None,
            "cached_tokens": timings.cached_tokens if timings else None,
            "prompt_tokens": timings.prompt_tokens if timings else None,
            "decoded_tokens": timings.decoded_tokens if timings else None,
            # Times are 0 if the instance reports only tokens, as on /v1/messages.
            "engine_prefill_ms": (timings.prompt_ms or None) if timings else None,
            "engine_decode_ms": (timings.decode_ms or None) if timings else None,
            "drafted_tokens": timings.drafted_tokens if timings else None,
            "accepted_tokens": timings.accepted_tokens if timings else None,
        }


def new_request_id() -> str:
    return f"req_{os.urandom(12).hex()}"
