"""What a finished request tells estimates: kept when it ends, learned when one is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from proxy.estimate.measures import Finished, ModelMeasures, Span
from proxy.request import ProxyRequest
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.upstream.timings import Timings

# The limit of an answer in each API.
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")


def note_finished(lease: Lease, timings: Timings, now_s: float) -> None:
    """Keep when a complete response was computed; nothing of one in chunks or without a token."""
    first_s = lease.progress.first_token_at_s
    if first_s is None or lease.chunked or lease.request.prompt is None:
        return
    decode_s, prompt_s = timings.decode_ms / 1000, timings.prompt_ms / 1000
    if decode_s + prompt_s <= now_s - lease.began_at_s:
        # Events that arrive together tell nothing of the time between them.
        first_s = min(first_s, now_s - decode_s)
    prompt_at_s = max(lease.began_at_s, first_s - prompt_s)
    span = Span(
        prompt_at_s,
        first_s,
        now_s,
        timings.prompt_tokens,
        timings.cached_tokens,
        timings.decoded_tokens,
    )
    overhead_s = prompt_at_s - lease.began_at_s if lease.sequences == 1 else None
    lease.instance.finished.add(Finished(span, limit_of(lease.request), overhead_s))


def with_times(timings: Timings, lease: Lease, now_s: float) -> Timings:
    """Add the times of our own clock to what an instance reports in tokens alone.

    Tokens that arrived together tell nothing of the time between them: such a response stays as
    it is.

    Source: llama-server, builds 10434 and 11434: `/v1/messages` has no `timings`.
    """
    first_s = lease.progress.first_token_at_s
    is_timed = timings.prompt_ms > 0 or timings.decode_ms > 0
    if is_timed or first_s is None or 2 * lease.progress.decoded < timings.decoded_tokens:
        return timings
    prompt_ms, decode_ms = 1000 * (first_s - lease.began_at_s), 1000 * (now_s - first_s)
    return replace(timings, prompt_ms=prompt_ms, decode_ms=decode_ms)


def learn(measures: ModelMeasures, instance: Instance, weight: float) -> None:
    """Learn from the requests of an instance that ended since the last time."""
    if not (new := instance.finished.take_unlearned()):
        return
    spans = [one.span for one in instance.finished.latest()]
    spans += [one for one in map(_span_so_far, instance.leases) if one]
    for finished in new:
        others = (one for one in spans if one is not finished.span)
        measures.note(finished, others, weight, instance.upstream.batch_tokens)


def limit_of(request: ProxyRequest) -> int | None:
    """Return the most tokens that an answer may have; None: the client sets no limit."""
    members = request.json
    for name in _LIMITS:
        if type(limit := members.get(name)) is int and limit > 0:
            return limit
    return None


def _span_so_far(lease: Lease) -> Span | None:
    """Return what is known of a request that is still computed."""
    progress, now_s = lease.progress, lease.clock()
    if lease.is_ending or not progress.prompt_done:
        return None
    computed = progress.prompt_done - progress.cached
    first_s = progress.first_token_at_s or now_s
    return Span(lease.began_at_s, first_s, now_s, computed, progress.cached, progress.decoded)
