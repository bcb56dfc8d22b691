"""Lines of output and error files, as OpenAI writes them. Pure.

    {"id": "batch_req_…", "custom_id": "1",
     "response": {"status_code": 200, "request_id": "req_…", "body": {…}}, "error": null}

Source: OpenAI's guide to the Batch API.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.batch.requests import OwnAnswer
from proxy.jobs.ids import new_id
from proxy.jobs.records import LineResult, Outcome

_EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def answered(number: int, custom_id: str, request_id: str, answer: OwnAnswer) -> LineResult:
    response = {
        "status_code": answer.status,
        "request_id": request_id,
        "body": _body(answer.body),
    }
    outcome: Outcome = "completed" if answer.status < HTTPStatus.BAD_REQUEST else "failed"
    return LineResult(number, outcome, _line(custom_id, response, None))


def expired(number: int, custom_id: str) -> LineResult:
    return LineResult(number, "expired", _line(custom_id, None, _EXPIRED))


def message_of(body: bytes) -> str:
    """The message of an error."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "the request failed"


def _line(custom_id: str, response: object, error: object) -> bytes:
    members = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE)


def _body(body: bytes) -> Any:
    """Parsed, since a line of a file must not contain one of the body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # not an instance's: its errors are JSON
        return {"error": {"message": body.decode("utf-8", "replace"), "type": "server_error"}}
