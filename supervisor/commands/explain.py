"""`corral explain`: where the time of one request went, and why its prompt was not cached."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.explanation.explanation import Explanation, Finding, explain
from proxy.requests.history import HistoryQuery, StoredRequest
from supervisor.commands.past_requests import past, running
from supervisor.commands.request_text import request_lines
from supervisor.errors import NoSuchRequest
from supervisor.output import CommandResult


def explain_request(request_id: str | None) -> CommandResult:
    """Explain a request that has ended; without an id, the latest."""
    found = past(HistoryQuery(limit=1, request_id=request_id))
    if not found:
        raise _unknown(request_id)
    explained = explain({**found[0], "request": found[0]["id"]})
    return CommandResult(explained.as_json(), "\n".join(_lines(explained, found[0])))


def _unknown(request_id: str | None) -> NoSuchRequest:
    hint = "corral requests --last 20 lists those that have ended"
    if request_id is None:
        return NoSuchRequest("no request is stored", hint="the first one that ends will be")
    if any(one["id"] == request_id for one in running()):
        return NoSuchRequest(
            f"{request_id} is still in flight",
            hint=f"corral requests show {request_id} shows how far it is",
        )
    return NoSuchRequest(f"no request has the id {request_id}", hint=hint)


def _lines(explained: Explanation, found: StoredRequest) -> Iterator[str]:
    for one in explained.findings:
        yield _sentence(one)
        if one.advice:
            yield f"  {one.advice}"
    if not explained.findings:
        yield "it ended before the engine reported figures, and no wait stands out"
    yield ""
    yield request_lines(found)


def _sentence(one: Finding) -> str:
    cost = f" (about {one.cost_ms / 1000:.2f} s)" if one.cost_ms >= 1 and one.advice else ""
    return f"{one.sentence[:1].upper()}{one.sentence[1:]}{cost}"
