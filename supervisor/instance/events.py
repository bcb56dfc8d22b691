"""Events of an instance whose fields are computed; all others are emitted where they happen."""

from __future__ import annotations

from proxy.upstream.timings import Timings
from supervisor.engine_client.client import ErrorResponse
from supervisor.events import Emit
from supervisor.warmup.prompts import WarmPrompt


def emit_prefill(emit: Emit, run: int, prompt: WarmPrompt, found: Timings | ErrorResponse) -> None:
    if isinstance(found, ErrorResponse):
        reason = found.message or f"status {found.status}"
        emit("prompt.rejected", run=run, prompt=prompt.name, reason=reason)
    else:
        tokens, cached = found.prompt_tokens, found.cached_tokens
        emit("prompt.prefilled", run=run, prompt=prompt.name, tokens=tokens, cached=cached)
