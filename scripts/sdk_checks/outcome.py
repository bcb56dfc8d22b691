"""The outcome of one feature, as a line of JSON for `scripts/sdks`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reported(feature: str) -> Iterator[None]:
    """Print whether the block that tries a feature ends, or the error that it raises."""
    result = "ok"
    try:
        yield
    except Exception as error:  # noqa: BLE001 (any error is the result)
        result = f"{type(error).__name__}: {error}"
    print(json.dumps({"feature": feature, "result": result}))
