"""The two text formats of `/metrics`: Prometheus's own, and OpenMetrics. Pure.

A sample has the same name in both. The family of a counter lacks `_total` in OpenMetrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

_PLAIN: Final = "text/plain"
_OPEN: Final = "application/openmetrics-text"


class Collector(Protocol):
    """Has the families to encode."""

    def collect(self) -> Iterable[Metric]: ...


Encode = Callable[[Collector], bytes]


def encoder(accept: str) -> tuple[Encode, str]:
    """The encoder of the format that an `Accept` header names first, and its content type.

    Plain text if it names neither.
    """
    kinds = (entry.partition(";")[0].strip().lower() for entry in accept.split(","))
    if next((kind for kind in kinds if kind in {_PLAIN, _OPEN}), _PLAIN) == _OPEN:
        # With its default, prometheus_client writes `:` as `_`, but only in the names of samples.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return encode, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4
