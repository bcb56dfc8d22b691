"""Checks all lines of a file, one after another. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import orjson

from proxy.errors import ProxyError, quoted
from proxy.jobs.records import StoredLine
from proxy.jobs.request_line import InvalidLine, RequestLine, is_blank, read_line
from proxy.settings import ProxySettings

_PROBLEMS_MAX: Final = 100

# Raises ProxyError where a client may not use a model of this name.
CheckModel = Callable[[str | None], object]


class Validation:
    """What is known of the lines so far; blank ones do not count.

    Attributes:
        total: Requests.
    """

    def __init__(self, endpoint: str, settings: ProxySettings, check_model: CheckModel) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._check_model = check_model
        self._numbers: dict[str, int] = {}
        self._problems: list[dict[str, object]] = []
        self.total = 0

    @property
    def is_full(self) -> bool:
        """Whether there are as many errors as are told."""
        return len(self._problems) >= _PROBLEMS_MAX

    def add_all(self, lines: Iterable[StoredLine]) -> None:
        for line in lines:
            self.add(line)

    def add(self, line: StoredLine) -> None:
        if is_blank(line.data):
            return
        self.total += 1
        try:
            request = read_line(line.data, self._endpoint, self._settings)
            self._check_custom_id(request, line.number)
            self._check_model(request.model)
        except InvalidLine as error:
            self._note(line.number, error.code, error.message, error.param)
        except ProxyError as error:
            self._note(line.number, error.code, error.message, "body.model")

    def errors(self) -> str | None:
        """The errors as JSON, OpenAI's list of them; None where there is none."""
        if not self.total:
            self._note(None, "empty_file", "the file has no requests", None)
        if not self._problems:
            return None
        return orjson.dumps({"object": "list", "data": self._problems}).decode()

    def _check_custom_id(self, request: RequestLine, number: int) -> None:
        first = self._numbers.setdefault(request.custom_id, number)
        if first != number:
            reason = f"custom_id {quoted(request.custom_id)} is that of line {first} already"
            raise InvalidLine("duplicate_custom_id", reason, "custom_id")

    def _note(self, number: int | None, code: str, message: str, param: str | None) -> None:
        if not self.is_full:
            self._problems.append(
                {"code": code, "line": number, "message": message, "param": param}
            )
