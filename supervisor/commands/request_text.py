"""Requests as people read them: a table of those that ended, and all about one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from supervisor.output import duration, table

_HEAD: Final = (
    "ID",
    "ENDED",
    "MODEL",
    "CLIENT",
    "STATUS",
    "TOOK",
    "WAITED",
    "FIRST TOKEN",
    "PROMPT",
    "CACHED",
    "TOKENS",
    "TOKENS/S",
)
_NONE: Final = "-"
_BAR_CELLS: Final = 24
# What each phase is called here, in their order.
_PHASES: Final[Mapping[str, str]] = {
    "queued": "queued",
    "evict": "waiting for memory",
    "load": "loading the model",
    "prefill": "prefill",
    "decode": "decode",
    "stalled": "client not reading",
    "other": "other",
}
_WAITS: Final = ("queued_ms", "evict_ms", "load_ms")


def request_rows(requests: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of requests that have ended."""
    return table(_HEAD, list(map(_row, requests)))


def request_lines(one: Mapping[str, Any]) -> str:
    """Return all figures of a request that has ended, and where its time went."""
    return "\n".join([_outcome(one), *_who(one), "", *_timeline(one), *_further(one)])


def running_lines(one: Mapping[str, Any]) -> str:
    """Return the figures of a request in flight."""
    place = f", place {one['position']}" if one["position"] else ""
    done = f"{one['prompt_tokens_done']} of {one['prompt_tokens'] or '?'} prompt tokens"
    return "\n".join(
        [
            f"{one['id']}: in flight for {duration(one['age_s'])}, {one['phase']}{place}",
            *_who(one),
            f"{done}, {one['cached_tokens']} of them cached; {one['decoded_tokens']} generated",
        ]
    )


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    waited = [one[name] for name in _WAITS if one[name] is not None]
    return (
        one["id"],
        f"{_local(one):%m-%d %H:%M:%S}",
        one["model"] or _NONE,
        one["client"] or _NONE,
        _status(one),
        _time(one["duration_ms"]),
        _time(sum(waited)) if waited else _NONE,
        _time(one["first_token_ms"]),
        _count(_prompt(one)),
        _count(one["cached_tokens"]),
        _count(one["decoded_tokens"]),
        _rate(one),
    )


def _outcome(one: Mapping[str, Any]) -> str:
    ended = f"ended {_local(one):%Y-%m-%d %H:%M:%S}"
    return f"{one['id']}: {_status(one)} after {_time(one['duration_ms'])}, {ended}"


def _status(one: Mapping[str, Any]) -> str:
    if one["cancelled"]:
        return f"{one['status']} by {one['cancelled']}"
    return f"{one['status'] or _NONE} {one['code'] or ''}".rstrip()


def _who(one: Mapping[str, Any]) -> Iterator[str]:
    parts = {
        "model": one["model"],
        "for": one.get("fallback_for"),
        "instance": one["instance"],
        "slot": one["slot"],
        "client": one["client"],
        "path": one["path"],
        "priority": one["priority"],
        "streamed": {True: "yes", False: "no"}.get(one.get("streamed")),  # type: ignore[arg-type]
        "attempts": one.get("attempts"),
    }
    yield "  ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def _timeline(one: Mapping[str, Any]) -> Iterator[str]:
    whole_ms = one["duration_ms"] or 0.0
    notes = {"prefill": _prefill(one), "decode": _decode(one)}
    for phase, name in _PHASES.items():
        ms = one[f"{phase}_ms"]
        if ms is not None:
            cells = "█" * round(_BAR_CELLS * ms / whole_ms) if whole_ms else ""
            line = f"{name:18}  {_time(ms):>9}  {cells:{_BAR_CELLS}}  {notes.get(phase, '')}"
            yield line.rstrip()


def _prefill(one: Mapping[str, Any]) -> str:
    if one["prompt_tokens"] is None:
        return ""
    expected = one["expected_cached_tokens"]
    return (
        f"{one['prompt_tokens']} tokens computed, {one['cached_tokens']} from the cache"
        f" ({_count(expected)} expected)"
    )


def _decode(one: Mapping[str, Any]) -> str:
    if not one["decoded_tokens"]:
        return ""
    drafted = one["drafted_tokens"]
    draft = f"; {one['accepted_tokens']} of {drafted} drafted were accepted" if drafted else ""
    return f"{one['decoded_tokens']} tokens, {_rate(one)}/s{draft}"


def _further(one: Mapping[str, Any]) -> Iterator[str]:
    figures = {
        "first byte": _time(one["first_byte_ms"]),
        "first token": _time(one["first_token_ms"]),
        "the engine's own prefill": _time(one["engine_prefill_ms"] or None),
        "and decode": _time(one["engine_decode_ms"] or None),
        "sent": None if one["bytes_out"] is None else f"{one['bytes_out']} bytes",
    }
    known = [f"{name} {value}" for name, value in figures.items() if value not in {None, _NONE}]
    if known:
        yield ""
        yield "; ".join(known)


def _local(one: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(one["ended_at"]).astimezone()


def _prompt(one: Mapping[str, Any]) -> int | None:
    if one["prompt_tokens"] is None:
        return None
    total: int = one["prompt_tokens"] + (one["cached_tokens"] or 0)
    return total


def _rate(one: Mapping[str, Any]) -> str:
    # On some endpoints, such as /v1/messages, engines report tokens and no times.
    tokens, decode_ms = one["decoded_tokens"], one["engine_decode_ms"] or one["decode_ms"]
    if not tokens or tokens < 2 or not decode_ms:
        return _NONE
    return f"{(tokens - 1) * 1000 / decode_ms:.1f}"


def _count(count: int | None) -> str:
    return _NONE if count is None else str(count)


def _time(ms: float | None) -> str:
    if ms is None:
        return _NONE
    if ms < 1000:
        return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
    return f"{ms / 1000:.2f} s" if ms < 60_000 else duration(ms / 1000)
