"""The lines of files: split on arrival, parsed as requests, checked, and written as results. Pure.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …}}

    {"id": "batch_req_…", "custom_id": "1",
     "response": {"status_code": 200, "request_id": "req_…", "body": {…}}, "error": null}

Source: OpenAI's guide to the Batch API, and its error codes as far as documented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.batches.own_requests import OwnAnswer
from proxy.batches.records import LineResult, Outcome, StoredLine, new_id
from proxy.errors import BadRequest, BodyTooComplex, ProxyError, quote
from proxy.http.body import count_values
from proxy.settings import JobSettings, ProxySettings


class LineSplitter:
    """Splits a file into lines, which keep their end of line; the last line may have none."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self.count = 0
        self.size_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that a piece completes; raise BadRequest above a limit."""
        self.size_bytes += len(piece)
        if self.size_bytes > self._settings.max_file_bytes:
            raise BadRequest(
                f"the file is larger than {self._settings.max_file_bytes} bytes; "
                "send several files, or raise max_file_bytes under [jobs]"
            )
        *complete, rest = piece.split(b"\n")
        lines = [self._line(part + b"\n") for part in complete]
        self._begin(rest)
        return lines

    def close(self) -> list[bytes]:
        """Return the last line, if it has no end of line; raises like `feed`."""
        return [self._line(b"")] if self._begun_bytes else []

    def _line(self, last: bytes) -> bytes:
        self._begin(last)
        self.count += 1
        if self.count > self._settings.max_lines:
            raise BadRequest(
                f"the file has more than {self._settings.max_lines} lines; "
                "send several files, or raise max_lines under [jobs]"
            )
        line = b"".join(self._begun)
        self._begun, self._begun_bytes = [], 0
        return line

    def _begin(self, part: bytes) -> None:
        self._begun_bytes += len(part)
        if self._begun_bytes > self._settings.max_line_bytes:
            raise BadRequest(
                f"line {self.count + 1} has more than {self._settings.max_line_bytes} bytes; "
                "shorten it, or raise max_line_bytes under [jobs]"
            )
        if part:
            self._begun.append(part)


CUSTOM_ID_MAX_CHARACTERS: Final = 512
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A valid line; `members` are the members of its body."""

    custom_id: str
    members: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        name = self.members.get("model")
        return name if isinstance(name, str) else None


class InvalidLine(ValueError):
    """A line is invalid; `code` and `param` are those of OpenAI's errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def is_blank(data: bytes) -> bool:
    return not data.strip() or data.strip() == _BYTE_ORDER_MARK


def read_line(data: bytes, endpoint: str, settings: ProxySettings) -> RequestLine:
    """Parse and check a line; raise InvalidLine if it is invalid."""
    members = _members(data.removeprefix(_BYTE_ORDER_MARK).strip(), settings)
    custom_id = _text(members, "custom_id")
    if not 0 < len(custom_id) <= CUSTOM_ID_MAX_CHARACTERS:
        reason = f"custom_id must have 1 to {CUSTOM_ID_MAX_CHARACTERS} characters"
        raise InvalidLine("invalid_custom_id", reason, "custom_id")
    if _text(members, "method") != "POST":
        raise InvalidLine("invalid_method", "method must be POST", "method")
    if (url := _text(members, "url")) != endpoint:
        reason = f"url is {quote(url)}, the endpoint of the batch {endpoint}"
        raise InvalidLine("invalid_url", reason, "url")
    if not isinstance(body := _member(members, "body"), dict):
        raise InvalidLine("invalid_request", "body must be an object", "body")
    return RequestLine(custom_id, body)


def read_valid_line(data: bytes) -> RequestLine:
    """Parse a line that passed `read_line` earlier, without checking limits again."""
    members = orjson.loads(data.strip().removeprefix(_BYTE_ORDER_MARK))
    return RequestLine(members["custom_id"], members["body"])


def _members(data: bytes, settings: ProxySettings) -> dict[str, Any]:
    try:
        count_values(data, settings.max_body_values, settings.max_body_depth)
        members = orjson.loads(data)
    except BodyTooComplex as error:
        raise InvalidLine(error.code, error.message) from error
    except orjson.JSONDecodeError as error:
        raise InvalidLine("invalid_json_line", f"the line is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise InvalidLine("invalid_json_line", "the line is not a JSON object")
    return members


def _member(members: dict[str, Any], name: str) -> object:
    if name not in members:
        raise InvalidLine("missing_required_parameter", f"the line has no {name}", name)
    return members[name]


def _text(members: dict[str, Any], name: str) -> str:
    value = _member(members, name)
    if not isinstance(value, str):
        raise InvalidLine("invalid_type", f"{name} must be a string", name)
    return value


_EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


def result_of(
    number: int, custom_id: str, answer: OwnAnswer | None, request_id: str = ""
) -> LineResult:
    """Return the result of a line; without an answer it has expired."""
    outcome: Outcome = "expired"
    members: dict[str, object] = {"id": new_id("batch_req_"), "custom_id": custom_id}
    members |= {"response": None, "error": None}
    if answer is None:
        members["error"] = _EXPIRED
    else:
        outcome = "completed" if answer.status < HTTPStatus.BAD_REQUEST else "failed"
        body = _body(answer.body)
        members["response"] = {"status_code": answer.status, "request_id": request_id, "body": body}
    return LineResult(number, outcome, orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE))


def message_of(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "the request failed"


def _body(body: bytes) -> Any:
    """Return the body as parsed JSON, because it must not add a line break to the line."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # not from an instance: its errors are JSON
        return {"error": {"message": body.decode("utf-8", "replace"), "type": "server_error"}}


# Raises ProxyError if the client may not use a model of this name.
CheckModel = Callable[[str | None], object]


class Validation:
    """The validation of a file's lines; blank lines do not count."""

    def __init__(self, endpoint: str, settings: ProxySettings, check_model: CheckModel) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._check_model = check_model
        self._numbers: dict[str, int] = {}
        self._problems: list[dict[str, object]] = []
        self.total = 0

    @property
    def is_full(self) -> bool:
        return len(self._problems) >= 100

    def add_all(self, lines: Iterable[StoredLine]) -> None:
        for line in lines:
            self.add(line)

    def add(self, line: StoredLine) -> None:
        if is_blank(line.data):
            return
        self.total += 1
        try:
            request = read_line(line.data, self._endpoint, self._settings)
            first = self._numbers.setdefault(request.custom_id, line.number)
            if first != line.number:
                reason = f"custom_id {quote(request.custom_id)} is that of line {first} already"
                raise InvalidLine("duplicate_custom_id", reason, "custom_id")  # noqa: TRY301
            self._check_model(request.model)
        except InvalidLine as error:
            self._note(line.number, error.code, error.message, error.param)
        except ProxyError as error:
            self._note(line.number, error.code, error.message, "body.model")

    def errors(self) -> str | None:
        """Return the errors as OpenAI's JSON list, None without errors."""
        if not self.total:
            self._note(None, "empty_file", "the file has no requests", None)
        if not self._problems:
            return None
        return orjson.dumps({"object": "list", "data": self._problems}).decode()

    def _note(self, number: int | None, code: str, message: str, param: str | None) -> None:
        if not self.is_full:
            self._problems.append(
                {"code": code, "line": number, "message": message, "param": param}
            )
