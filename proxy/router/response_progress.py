"""How far the response to one request has come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Protocol

from proxy.errors import ContextTooLong

# An engine's HTTP threads send `:` lines in an open stream whether or not it still computes.
# Source: llama-server --sse-ping-interval; WHATWG HTML, section "Interpreting an event stream".
_PING: Final = b":\r\n "


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class ResponseProgress:
    """Counted by the relay; read for `/slots`, for liveness and for the backlog of an instance.

    Attributes:
        is_awaiting_upstream: Whether the next bytes are the instance's to send; else the client has
            yet to take what was sent.
        bytes_received: Of the body, without pings.
        prompt_done: Prompt tokens computed or cached.
        prompt_step: Prompt tokens computed in the latest pass; in several if their reports arrived
            together.
        prompt_total: An estimate until the instance reports progress.
        prompt_max: The most that it may be.
        is_reported: Whether the instance reported the figures of the prompt.
        chunked: Prompt tokens that earlier requests computed for this one, which are no cache.
        decoded: Events of generated text.
    """

    __slots__ = (
        "_clock",
        "_on_first_token",
        "bytes_received",
        "cached",
        "chunked",
        "decoded",
        "first_token_at_s",
        "has_header",
        "is_awaiting_upstream",
        "is_reported",
        "prompt_done",
        "prompt_max",
        "prompt_step",
        "prompt_total",
    )

    def __init__(self, clock: Clock, on_first_token: Callable[[], None] | None = None) -> None:
        self.has_header = False
        self.is_awaiting_upstream = True
        self.is_reported = False
        self.bytes_received = 0
        self.prompt_done = 0
        self.prompt_step = 0
        self.prompt_total = 0
        self.prompt_max = sys.maxsize
        self.cached = 0
        self.chunked = 0
        self.decoded = 0
        self.first_token_at_s: float | None = None
        self._clock = clock
        self._on_first_token = on_first_token

    def receive(self, chunk: bytes) -> None:
        """Count bytes that the client has yet to take."""
        self.is_awaiting_upstream = False
        if chunk.strip(_PING):
            self.bytes_received += len(chunk)

    def receive_token(self, chunk: bytes) -> None:
        self.receive(chunk)
        self.count_token()

    def count_token(self) -> None:
        self.decoded += 1
        if self.first_token_at_s is None:
            self.first_token_at_s = self._clock()
            if self._on_first_token:
                self._on_first_token()

    def set_prompt(self, done: int, total: int, cached: int) -> None:
        """Take the progress that the instance reports, in tokens; cached tokens count as done.

        Source: llama-server, build 10434: `return_progress` reports after each pass.

        Raises:
            ContextTooLong: The prompt has more than `prompt_max`, which was only estimated before.
        """
        if total > self.prompt_max:
            raise ContextTooLong(
                f"prompt is too long: {total} tokens > {self.prompt_max} maximum (max_context of "
                "its API key)"
            )
        self.prompt_step = max(0, done - max(self.prompt_done, cached))
        self.prompt_done, self.prompt_total = done, total
        self.cached = cached - min(self.chunked, cached)
        self.is_reported = True

    def remaining_tokens(self, expected_cached: int) -> int:
        if self.decoded:
            return 0
        return max(0, self.prompt_total - max(self.prompt_done, expected_cached))
