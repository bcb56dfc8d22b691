"""Splits a file that arrives in pieces into lines within the limits. Pure."""

from __future__ import annotations

from proxy.errors import BadRequest
from proxy.jobs.settings import JobSettings


class LineSplitter:
    """Lines keep their end of line; the last one may have none.

    Attributes:
        count: Lines so far.
        size_bytes: Bytes of the file so far.
    """

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self.count = 0
        self.size_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that a piece completes. Raises BadRequest above a limit."""
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
        """The last line, if it has no end. Raises as `feed`."""
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
