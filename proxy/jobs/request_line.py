"""One line of a file of requests. Pure.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …}}

Source: OpenAI's guide to the Batch API, and its codes of errors where they are documented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.body.count import count_values
from proxy.errors import BodyTooComplex, quoted
from proxy.settings import ProxySettings

CUSTOM_ID_MAX_CHARACTERS: Final = 512
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A valid line; `members` are those of its body."""

    custom_id: str
    members: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        name = self.members.get("model")
        return name if isinstance(name, str) else None


class InvalidLine(ValueError):
    """A line is wrong; `code` and `param` as OpenAI's errors have them."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def is_blank(data: bytes) -> bool:
    return not data.strip() or data.strip() == _BYTE_ORDER_MARK


def read_line(data: bytes, endpoint: str, settings: ProxySettings) -> RequestLine:
    """Raises InvalidLine."""
    members = _members(data.removeprefix(_BYTE_ORDER_MARK).strip(), settings)
    custom_id = _text(members, "custom_id")
    if not 0 < len(custom_id) <= CUSTOM_ID_MAX_CHARACTERS:
        reason = f"custom_id must have 1 to {CUSTOM_ID_MAX_CHARACTERS} characters"
        raise InvalidLine("invalid_custom_id", reason, "custom_id")
    if _text(members, "method") != "POST":
        raise InvalidLine("invalid_method", "method must be POST", "method")
    if (url := _text(members, "url")) != endpoint:
        reason = f"url is {quoted(url)}, the endpoint of the batch {endpoint}"
        raise InvalidLine("invalid_url", reason, "url")
    body = _member(members, "body")
    if not isinstance(body, dict):
        raise InvalidLine("invalid_request", "body must be an object", "body")
    return RequestLine(custom_id, body)


def read_valid_line(data: bytes) -> RequestLine:
    """Read a line that passed `read_line`, whatever the limits are now."""
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
