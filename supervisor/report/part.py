"""One file of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """`note`: what was left out of it, as a sentence."""

    name: str
    text: str
    note: str | None = None
