"""Implements `corral requests`: requests in flight, and ended requests. Starts fast.

A running daemon has exclusive use of the database of ended requests, so it is asked for them;
without a daemon, this process reads the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

from proxy.observe.past import HistoryQuery, RequestStats, StoredRequest
from supervisor.cli.options import seconds_of
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import phase_text
from supervisor.errors import HistoryUnavailable, NoSuchRequest, NotRunning, SettingsInvalid
from supervisor.output import CommandResult, duration, fit, table, terminal_columns, warn
from supervisor.system.paths import directories

_NONE: Final = "-"
_BAR_CELLS: Final = 24
# The names of the phases, in order.
_PHASES: Final[Mapping[str, str]] = {
    "queued": "queued",
    "evict": "waiting for memory",
    "load": "loading the model",
    "slots": "asking for the slots",
    "prefill": "prefill",
    "decode": "decode",
    "paused": "paused",
    "stalled": "client not reading",
    "other": "other",
}
_WAITS: Final = ("queued_ms", "evict_ms", "load_ms")


# The columns that narrow terminals leave out, in this order.
IN_FLIGHT_LEAST: Final = ("SLOT", "INSTANCE", "CLIENT", "TOKENS", "TOKENS/S", "AGE")
ENDED_LEAST: Final = (
    *("CLIENT", "TOKENS/S", "WAITED", "TOKENS", "PROMPT", "CACHED", "FIRST TOKEN"),
    *("ENDED", "TOOK"),
)
_PREFIX: Final = "req_"
_SHORT_CHARACTERS: Final = 8
_LATEST: Final = 500  # among which a short id is looked up


def short_id(request_id: str) -> str:
    """Return the part of an id that terminals show; commands find a request by it."""
    return request_id.removeprefix(_PREFIX)[:_SHORT_CHARACTERS]


def _begins(request_id: str, word: str) -> bool:
    return request_id.startswith(word) or request_id.removeprefix(_PREFIX).startswith(word)


def request_rows(requests: Sequence[Mapping[str, Any]], columns: int | None = None) -> str:
    return _table([*map(ended_row, requests)], columns, ENDED_LEAST)


def rows_text(rows: Sequence[Mapping[str, str]], least: Sequence[str], otherwise: str) -> str:
    return _table(rows, terminal_columns(), least) if rows else otherwise


def _table(rows: Sequence[Mapping[str, str]], columns: int | None, least: Sequence[str]) -> str:
    """Return a table of rows, each with the title of every column; short ids on a terminal."""
    cells = [
        [short_id(text) if columns and title == "ID" else text for title, text in row.items()]
        for row in rows
    ]
    return table(*fit([*rows[0]], cells, columns, least))


def request_lines(request: Mapping[str, Any]) -> str:
    """Return all figures of an ended request, with a timeline of its phases."""
    took = f"after {_time(request['duration_ms'])}, ended {_local(request):%Y-%m-%d %H:%M:%S}"
    title = f"{request['id']}: {_status(request)} {took}"
    lines = [title, _origin_line(request), "", *_timeline(request), *_figure_lines(request)]
    return "\n".join(lines)


def running_lines(row: Mapping[str, Any]) -> str:
    place = f", place {row['position']}" if row["position"] else ""
    done = f"{row['prompt_tokens_done']} of {row['prompt_tokens'] or '?'} prompt tokens"
    title = f"{row['id']}: in flight for {duration(row['age_s'])}, {row['phase']}{place}"
    tokens = f"{done}, {row['cached_tokens']} of them cached; {row['decoded_tokens']} generated"
    return "\n".join([title, _origin_line(row), tokens])


def ended_row(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a request by the titles of their columns; raises KeyError."""
    waited = [request[name] for name in _WAITS if request[name] is not None]
    prompt = request["prompt_tokens"]
    return {
        "ID": request["id"],
        "ENDED": f"{_local(request):%m-%d %H:%M:%S}",
        "MODEL": request["model"] or _NONE,
        "CLIENT": request["client"] or _NONE,
        "STATUS": _status(request),
        "TOOK": _time(request["duration_ms"]),
        "WAITED": _time(sum(waited)) if waited else _NONE,
        "FIRST TOKEN": _time(request["first_token_ms"]),
        "PROMPT": _NONE if prompt is None else str(prompt + (request["cached_tokens"] or 0)),
        "CACHED": _count(request["cached_tokens"]),
        "TOKENS": _count(request["decoded_tokens"]),
        "TOKENS/S": _rate(request),
    }


def _status(request: Mapping[str, Any]) -> str:
    if request["cancelled"]:
        return f"{request['status']} by {request['cancelled']}"
    return f"{request['status'] or _NONE} {request['code'] or ''}".rstrip()


def _origin_line(request: Mapping[str, Any]) -> str:
    streamed = request.get("streamed")
    parts = {"model": request["model"], "for": request.get("fallback_for")}
    parts |= {name: request[name] for name in ("instance", "slot", "client", "path", "priority")}
    parts["streamed"] = streamed if streamed is None else "yes" if streamed else "no"
    parts["attempts"] = request.get("attempts")
    return "  ".join(f"{name}={value}" for name, value in parts.items() if value is not None)


def _timeline(request: Mapping[str, Any]) -> Iterator[str]:
    whole_ms = request["duration_ms"] or 0.0
    notes = {"prefill": _prefill_note(request), "decode": _decode_note(request)}
    for phase, name in _PHASES.items():
        ms = request[f"{phase}_ms"]
        if ms is not None:
            cells = "█" * round(_BAR_CELLS * ms / whole_ms) if whole_ms else ""
            line = f"{name:20}  {_time(ms):>9}  {cells:{_BAR_CELLS}}  {notes.get(phase, '')}"
            yield line.rstrip()


def _prefill_note(request: Mapping[str, Any]) -> str:
    if request["prompt_tokens"] is None:
        return ""
    expected = request["expected_cached_tokens"]
    return (
        f"{request['prompt_tokens']} tokens computed, {request['cached_tokens']} from the cache"
        f" ({_count(expected)} expected)"
    )


def _decode_note(request: Mapping[str, Any]) -> str:
    if not request["decoded_tokens"]:
        return ""
    drafted = request["drafted_tokens"]
    draft = f"; {request['accepted_tokens']} of {drafted} drafted were accepted" if drafted else ""
    return f"{request['decoded_tokens']} tokens, {_rate(request)}/s{draft}"


def _figure_lines(request: Mapping[str, Any]) -> Iterator[str]:
    figures = {
        "first byte": _time(request["first_byte_ms"]),
        "first token": _time(request["first_token_ms"]),
        "the engine's own prefill": _time(request["engine_prefill_ms"] or None),
        "and decode": _time(request["engine_decode_ms"] or None),
        "sent": None if request["bytes_out"] is None else f"{request['bytes_out']} bytes",
    }
    known = [f"{name} {value}" for name, value in figures.items() if value not in {None, _NONE}]
    if known:
        yield ""
        yield "; ".join(known)


def _local(request: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(request["ended_at"]).astimezone()


def _rate(request: Mapping[str, Any]) -> str:
    # On some endpoints, such as /v1/messages, engines report tokens and no times.
    tokens = request["decoded_tokens"]
    decode_ms = request["engine_decode_ms"] or request["decode_ms"]
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


def list_requests() -> CommandResult:
    """List the requests in flight, oldest first."""
    found = Client(directories().control_socket).requests()
    return CommandResult(found, in_flight_rows(found, terminal_columns()))


def in_flight_rows(requests: Sequence[RequestStats], columns: int | None) -> str:
    if not requests:
        return "no request is in flight"
    return _table([*map(in_flight_row, requests)], columns, IN_FLIGHT_LEAST)


def cancel(request_id: str) -> CommandResult:
    client = Client(directories().control_socket)
    ids = [request.id for request in client.requests() if _begins(request.id, request_id)]
    found = ids[0] if len(ids) == 1 else request_id
    client.cancel_request(found)
    return CommandResult({"id": found}, f"cancelled {found}")


def in_flight_row(request: RequestStats) -> dict[str, str]:
    """Return the cells of a request by the titles of their columns."""
    return {
        "ID": request.id,
        "AGE": duration(request.age_s),
        "MODEL": request.model or _NONE,
        "INSTANCE": request.instance or _NONE,
        "SLOT": _count(request.slot),
        "CLIENT": request.client + (" (batch)" if request.priority == "batch" else ""),
        "PHASE": phase_text(request),
        "TOKENS": str(request.decoded_tokens or _NONE),
        "TOKENS/S": f"{request.tokens_per_second:.1f}" if request.tokens_per_second else _NONE,
    }


_LIMIT: Final = 20


def list_past(query: HistoryQuery, since: str | None = None) -> CommandResult:
    """List ended requests, the latest last; works without a daemon."""
    if since is not None:
        query = replace(query, since=since_of(since, datetime.now(UTC)))
    found = list(reversed(read_past_requests(query)))
    text = request_rows(found, terminal_columns()) if found else "no such request is stored"
    return CommandResult(found, text)


def show(request_id: str) -> CommandResult:
    for request in read_running_requests():
        if _begins(str(request["id"]), request_id):
            return CommandResult({"state": "in_flight", **request}, running_lines(request))
    found = find_past_requests(request_id)
    if not found:
        raise NoSuchRequest(
            f"no request has the id {request_id}", hint="corral requests --last 20 lists some"
        )
    notes = ("further requests have this id; this is the latest",) if len(found) > 1 else ()
    return CommandResult({"state": "finished", **found[0]}, request_lines(found[0]), notes)


def running_ids() -> list[str]:
    return [str(request["id"]) for request in read_running_requests()]


def latest_ids() -> list[str]:
    past = read_past_requests(HistoryQuery(limit=_LIMIT))
    return [*running_ids(), *(str(request["id"]) for request in past)]


def forget(model: str | None, *, everything: bool) -> CommandResult:
    """Delete the stored requests of a model, or of all models; works without a daemon."""
    if (model is None) is not everything:
        raise SettingsInvalid("name a model with --model, or give --all")
    count = ask_records("forget_requests", model, 0)
    return CommandResult({"count": count}, f"deleted: figures of {count} requests")


def since_of(text: str, now: datetime) -> float:
    """Return the Unix time of an age (`90s`) or a local ISO 8601 date; raises SettingsInvalid."""
    try:
        if (age_s := seconds_of(text)) is not None:
            return now.timestamp() - age_s
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise SettingsInvalid(
            f"--since {text!r} is not a time", hint="use 90s, 15m, 1h, 2d or 2026-11-22T10:00"
        ) from None


def read_running_requests() -> Sequence[StoredRequest]:
    """Return the requests in flight; none without a daemon."""
    try:
        return [asdict(request) for request in Client(directories().control_socket).requests()]
    except NotRunning:
        return ()


def read_past_requests(query: HistoryQuery) -> Sequence[StoredRequest]:
    """Return ended requests, the latest first; works without a daemon."""
    found: Sequence[StoredRequest] = ask_records("requests", query, ())
    return found


def find_past_requests(request_id: str) -> Sequence[StoredRequest]:
    """Return the ended requests of an id, or of the latest id that begins so."""
    if found := read_past_requests(HistoryQuery(limit=2, request_id=request_id)):
        return found
    latest = read_past_requests(HistoryQuery(limit=_LATEST))
    return [found for found in latest if _begins(str(found["id"]), request_id)][:1]


def ask_records(question: str, asked: object, nothing: object) -> Any:
    """Ask the daemon, or read the file without one; returns `nothing` if there is no file."""
    where = directories()
    with suppress(NotRunning):
        return Client(where.control_socket).records(question, asked)
    from supervisor.records.store import RecordsFailedError, RecordStore

    store = RecordStore(where.data)
    if not store.exists:
        return nothing
    try:
        return store.answer(question, asked)
    except RecordsFailedError as error:
        raise HistoryUnavailable(f"the records cannot be read: {error}") from error
    finally:
        store.close()
        for name, problem in store.problems:
            kept = f" ({problem['kept']})" if "kept" in problem else ""
            warn(f"{name}: {problem['reason']}{kept}")
