"""How long something may take.

`scripts/faults` holds all to these limits. In the test suite a busy machine must not decide: there
they are only what tells an end that came from one that never would have.
"""

from __future__ import annotations

import time

slack = 1.0


def within(limit_s: float, took_s: float, what: str = "") -> tuple[str, str]:
    """Return the expected and the observed effect.

    Args:
        limit_s: How long it may take.
        took_s: How long it took.
        what: What it is, where that is not clear.
    """
    expected = f"{what} within {limit_s:g} s".strip()
    seen = f"{what} after {took_s:.2g} s".strip()
    return expected, expected if took_s < slack * limit_s else seen


def since(began_at_s: float) -> float:
    """Return how long ago a moment of the monotonic clock was."""
    return time.monotonic() - began_at_s
