"""Leaves out of an engine's log what it quotes of requests that it refuses. Pure.

At its usual verbosity an engine logs no prompt and no answer, but it quotes what it cannot read: a
tool, a schema, the name of a sampler, a grammar as a whole.

Source: llama-server, build 10434: server-http.cpp, "got exception"; sampling.cpp, "unable to match
sampler by name"; llama-grammar.cpp, "error parsing grammar", then an empty line and the grammar.
"""

from __future__ import annotations

import re
from typing import Final

LEFT_OUT: Final = b"[left out: it quotes the request]"
_QUOTING: Final = re.compile(
    rb"got exception: |unable to match sampler by name |parse: error parsing grammar: "
)
_GRAMMAR: Final = b"parse: error parsing grammar: "
# What follows the grammar: a line with a time, or of a build that prints none.
_BEHIND: Final = re.compile(rb"\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |(srv|slot|que|res|llama_\w+): ? ")
_FAILED: Final = b"failed to parse grammar"
_GRAMMAR_LINES_MAX: Final = 10_000
# A longer line is decided by its beginning.
_HELD_MAX_BYTES: Final = 4096


class QuotedRequests:
    """Reads one stream, and holds a line until it has ended or is long."""

    def __init__(self) -> None:
        self._held = b""
        self._grammar_lines = 0  # that may follow
        self._is_decided = False  # what to do with the rest of a long line
        self._drops_rest = False

    def feed(self, chunk: bytes) -> bytes:
        """Return what of the stream may be written now."""
        if self._is_usual and chunk.endswith(b"\n") and not _QUOTING.search(chunk):
            return chunk
        *lines, last = chunk.split(b"\n")
        passed = [self._ended(line) for line in lines]
        return b"".join([*passed, self._begun(last)])

    def flush(self) -> bytes:
        """Return what is held, at the end of the stream."""
        return self._ended(b"").removesuffix(b"\n") if self._held else b""

    @property
    def _is_usual(self) -> bool:
        return not (self._held or self._grammar_lines or self._is_decided)

    def _ended(self, rest: bytes) -> bytes:
        """Take the end of a line."""
        if self._is_decided:
            self._is_decided = False
            return b"\n" if self._drops_rest else rest + b"\n"
        line, self._held = self._held + rest, b""
        kept = self._without_quote(line)
        return b"" if kept is None else kept + b"\n"

    def _begun(self, part: bytes) -> bytes:
        """Take a part of a line that has not ended."""
        if self._is_decided:
            return b"" if self._drops_rest else part
        self._held += part
        if len(self._held) <= _HELD_MAX_BYTES:
            return b""
        line, self._held = self._held, b""
        kept = self._without_quote(line)
        self._is_decided, self._drops_rest = True, kept != line
        return kept or b""

    def _without_quote(self, line: bytes) -> bytes | None:
        """Return a line without what it quotes; None for a line of a grammar."""
        if self._grammar_lines:
            if not (_BEHIND.match(line) or _FAILED in line):
                self._grammar_lines -= 1
                return None
            self._grammar_lines = 0
        if found := _QUOTING.search(line):
            self._grammar_lines = _GRAMMAR_LINES_MAX if found[0] == _GRAMMAR else 0
            return line[: found.end()] + LEFT_OUT
        return line
