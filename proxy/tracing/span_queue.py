"""Finished spans on their way to a collector: a bounded queue, and a thread that sends them.

The library's own processor starts a thread in every process that is forked, and engines are forked.
A collector that is down costs nothing else: what it does not take is lost and counted, which is one
warning until it takes some again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_QUEUE_MAX: Final = 2048
_BATCH_MAX: Final = 512
_CLOSE_S: Final = 0.5
_REASON_MAX: Final = 400


class SpanQueue(SpanProcessor):
    """Sends spans with an exporter; `on_failure` and `on_recovery` are called in its thread.

    Args:
        exporter: Sends one batch; blocks.
        delay_s: The longest time that a span waits for others.
        on_failure: Called with the reason, with the first batch in a row that was lost.
        on_recovery: Called with the number of spans that were lost since.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        delay_s: float,
        on_failure: Callable[[str], None],
        on_recovery: Callable[[int], None],
    ) -> None:
        self._exporter = exporter
        self._on_failure = on_failure
        self._on_recovery = on_recovery
        self._delay_s = delay_s
        self._spans = deque[ReadableSpan](maxlen=_QUEUE_MAX)
        self._lost = 0
        self._is_failing = False
        self._is_closed = False
        self._woken = threading.Event()
        self._reasons = _Reasons()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._spans) == _QUEUE_MAX:
            self._lost += 1
        self._spans.append(span)
        if len(self._spans) >= _BATCH_MAX:
            self._woken.set()

    def shutdown(self) -> None:
        """Send what is left, for half a second at most."""
        self._is_closed = True
        self._woken.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()

    def _work(self) -> None:
        while not self._is_closed:
            self._woken.wait(self._delay_s)
            self._woken.clear()
            self._send_all()

    def _send_all(self) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(_BATCH_MAX, len(self._spans)))]
            is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
            self._note(len(batch), is_sent=is_sent)

    def _note(self, spans: int, *, is_sent: bool) -> None:
        if not is_sent:
            self._lost += spans
            if not self._is_failing:
                self._on_failure(self._reasons.last)
        elif self._is_failing:
            lost, self._lost = self._lost, 0
            self._on_recovery(lost)
        self._is_failing = not is_sent


class _Reasons(logging.Handler):
    """Silences the library, and keeps why the last attempt failed.

    A warning is about one attempt, and its first value is the reason; an error without several
    values only says that there were enough of them.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "no reason given"
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [logging.NullHandler()], False
        logging.getLogger("opentelemetry.exporter").handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        values = record.args if isinstance(record.args, tuple) else ()
        if record.levelno == logging.WARNING and values:
            self.last = str(values[0])[:_REASON_MAX]
        elif len(values) > 1:
            self.last = record.getMessage()[:_REASON_MAX]
