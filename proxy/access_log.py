"""What is remembered of one request, told once when it is over.

    request.finished    it reached a model: answered, broken off, or left by its client (499)
    request.rejected     it did not
    upstream.failed      an instance failed it; told beside the other two

Pages that the proxy answers itself are told only when refused: a health probe each second would
drown the rest.
"""

from __future__ import annotations

import time
from typing import Protocol

from proxy.errors import ProxyError
from proxy.upstream.timings import Timings

CLIENT_GONE = 499


class Emit(Protocol):
    """Whoever is told. `fields` are those of the event's line above, all of them, always."""

    def __call__(self, name: str, /, **fields: object) -> None:
        """Hear it; must not fail and must not block."""


def discard(_name: str, /, **_fields: object) -> None:
    """Ignore an event (`Emit`)."""


class AccessRecord:
    """One request's figures, filled in on its way.

    Attributes:
        request_id: The name of the request in logs and headers.
        model: The id of the model asked for, once known.
        instance: The name of the instance that answers, once known; of two, the last.
        status: How it ended: the status that the client got, that of the error which broke an
            answer off, or 499 where the client left; None before that.
        bytes_out: Bytes of the body that were sent to the client.
        timings: What the instance did for it, in its own words; None where it did not say.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.model: str | None = None
        self.instance: str | None = None
        self.status: int | None = None
        self.bytes_out = 0
        self.timings: Timings | None = None
        self._attempts = 0
        self._waited_ms: float | None = None
        self._expected_cached = 0
        self._began_at_s = time.monotonic()
        self._first_byte_ms: float | None = None
        self._first_token_ms: float | None = None

    def set_instance(self, instance: str, waited_s: float = 0.0, expected_cached: int = 0) -> None:
        """Note that an instance has the request now.

        Args:
            instance: Its name.
            waited_s: Seconds that this took since the request joined the line, at least 0.
            expected_cached: Tokens of the prompt that its cache is believed to hold.
        """
        self.instance = instance
        self._attempts += 1
        self._waited_ms = round((self._waited_ms or 0.0) + waited_s * 1000, 1)
        self._expected_cached = expected_cached

    def part(self) -> AccessRecord:
        """Return the record of one of several answers that make up this one."""
        part = AccessRecord(self.request_id)
        part.model, part._began_at_s = self.model, self._began_at_s
        return part

    def add(self, part: AccessRecord) -> None:
        """Take in the record of one of them that is over."""
        self._attempts = max(self._attempts, part._attempts)
        if part._first_token_ms is not None:
            known_ms = self._first_token_ms
            first_ms = part._first_token_ms
            self._first_token_ms = first_ms if known_ms is None else min(known_ms, first_ms)
        if part.timings:
            self._expected_cached += part._expected_cached if self.timings else 0
            self.timings = part.timings.added_to(self.timings)

    def note_token(self) -> None:
        """Note that generated text came; only the first time counts."""
        if self._first_token_ms is None:
            self._first_token_ms = self._since_ms()

    def count(self, chunk: bytes) -> None:
        """Note that these bytes are on their way to the client."""
        if chunk and not self.bytes_out:
            self._first_byte_ms = self._since_ms()
        self.bytes_out += len(chunk)

    def emit(self, tell: Emit, refused_by: ProxyError | None) -> None:
        """Tell how the request ended."""
        if refused_by and not self.instance:
            tell(
                "request.rejected",
                request=self.request_id,
                model=self.model,
                status=refused_by.status,
                code=refused_by.code,
                reason=refused_by.message,
            )
        elif self.model:
            tell(
                "request.finished",
                request=self.request_id,
                model=self.model,
                instance=self.instance,
                status=self.status,
                attempts=self._attempts,
                queued_ms=self._waited_ms,
                first_byte_ms=self._first_byte_ms,
                first_token_ms=self._first_token_ms,
                duration_ms=self._since_ms(),
                bytes_out=self.bytes_out,
                **self._tokens(),
            )

    def emit_upstream_failure(self, tell: Emit, error: ProxyError) -> None:
        """Tell that the instance failed this request, before or after its header."""
        tell(
            "upstream.failed",
            request=self.request_id,
            model=self.model,
            instance=self.instance,
            phase="ask" if self.status is None else "answer",
            error=error.message,
        )

    def _tokens(self) -> dict[str, float | None]:
        """Return what the instance said of its work; None for all of it where it said nothing."""
        said = self.timings
        return {
            "expected_cached_tokens": self._expected_cached if said else None,
            "cached_tokens": said.cached_tokens if said else None,
            "prompt_tokens": said.prompt_tokens if said else None,
            "decoded_tokens": said.decoded_tokens if said else None,
            "decode_ms": said.decode_ms if said else None,
            "drafted_tokens": said.drafted_tokens if said else None,
            "accepted_tokens": said.accepted_tokens if said else None,
        }

    def _since_ms(self) -> float:
        return round((time.monotonic() - self._began_at_s) * 1000, 1)
