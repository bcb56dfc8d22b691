"""Rules that every response must follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from fuzz.client import Answer
from fuzz.request import Input

from proxy.forward import upstream_errors

_ANTHROPIC: Final = "/v1/messages"

_FINAL = (b'"not_loaded"', b'"model_failed"', b"no model can be served", b"no model is configured")


def wrong(what: Input, answer: Answer) -> Iterator[str]:
    status = answer.status
    if status is None:
        if what.is_whole and answer.ending in {"closed", "timeout"}:
            yield f"no answer ({answer.ending}) to {what.target}"
        return
    if what.leave_after_s is None and answer.ending != "complete":
        yield f"an answer {status} that does not end well ({answer.ending}) to {what.target}"
        return
    if status in {500, 502, 504}:
        yield f"{status} {message(answer.body)} to {what.target}"
    # What a retry does not change has no such header: proxy/DESIGN.md, what fails.
    is_final = any(reason in answer.body for reason in _FINAL)
    if status == 503 and "retry-after" not in answer.headers and not is_final:
        yield f"503 without Retry-After, {message(answer.body)} to {what.target}"
    if answer.ending == "complete" and not what.is_head:
        yield from _badly_shaped(what, answer)


def _badly_shaped(what: Input, answer: Answer) -> Iterator[str]:
    kind = answer.headers.get("content-type", "")
    if answer.status is not None and answer.status >= 400:
        if not kind.startswith("application/json") or not is_error(what, answer.body):
            yield f"{answer.status} whose body is no error in JSON, to {what.target}"
    elif kind.startswith("application/json") and _json(answer.body) is None:
        yield f"{answer.status} whose body is not JSON, to {what.target}"
    elif kind.startswith("text/event-stream"):
        yield from _bad_events(what, answer.body)


def _bad_events(what: Input, body: bytes) -> Iterator[str]:
    for line in body.splitlines():
        data = line.removeprefix(b"data: ")
        if data in {line, b"[DONE]"}:
            continue
        event = _json(data)
        # Build 10434 streams a null between the answers to several prompts.
        if event is None and data != b"null":
            yield f"an event that is not JSON, to {what.target}"
            return
        code = (event.get("error") or {}).get("code") if isinstance(event, dict) else None
        if code == 500 and upstream_errors.reclassify_error(500, data)[0] == 400:
            continue  # the engine's own error event for a client error
        if code in {500, 502, 504, "internal_error", "upstream_failed", "upstream_timeout"}:
            yield f"an error event {message(data)} to {what.target}"
            return


def is_error(what: Input, body: bytes) -> bool:
    content = _json(body)
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return False
    # Where the framing is broken, the path may be unknown.
    is_anthropic = what.is_whole and what.target.startswith(f"POST {_ANTHROPIC}")
    return isinstance(error.get("type"), str) and (
        not is_anthropic or content.get("type") == "error"
    )


def message(body: bytes) -> str:
    content = _json(body)
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        return f"{error.get('code')} {str(error.get('message'))[:60]!r}"
    return repr(body[:60])


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
