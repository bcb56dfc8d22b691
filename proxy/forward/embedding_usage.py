"""The tokens that a response to an embedding or a reranking reports, read as it passes. Pure.

Source: llama-server, build 10434: `usage` with `prompt_tokens`, before the numbers or behind them.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.router.lease import Completion
from proxy.upstream.timings import Timings

_USAGE: Final = re.compile(rb'"usage":\s*\{[^{}]{0,256}?"prompt_tokens":\s*(\d{1,12})')
_END_BYTES: Final = 1024


class EmbeddingUsage:
    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < _END_BYTES:
            self._head += chunk[:_END_BYTES]
        self._tail = (self._tail + chunk)[-_END_BYTES:]

    def close(self) -> Completion:
        found = _USAGE.search(self._head) or _USAGE.search(self._tail)
        return Completion(all_choices=Timings(0, int(found[1]), 0.0, 0, 0.0) if found else None)
