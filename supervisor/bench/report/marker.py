"""The marks of values: a shape for each variant, because colour alone does not tell everyone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.etree.ElementTree import Element

from supervisor.bench.report.markup import element

# Corners about the middle; the first variant has a circle.
_SHAPES: Final[Sequence[Sequence[tuple[float, float]]]] = (
    (),
    ((-3.2, -3.2), (3.2, -3.2), (3.2, 3.2), (-3.2, 3.2)),
    ((0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)),
    ((0, -4.4), (4.2, 3.2), (-4.2, 3.2)),
    ((0, 4.4), (4.2, -3.2), (-4.2, -3.2)),
    ((-4.2, -1.6), (4.2, -1.6), (4.2, 1.6), (-4.2, 1.6)),
)
KINDS: Final = len(_SHAPES)
_RADIUS: Final = 3.7


def marker(place: int, x: float, y: float, text: str) -> Element:
    """Draw the mark of the variant at `place`; `text` shows while the pointer rests on it."""
    corners = _SHAPES[place % KINDS]
    label = element("title", text)
    if not corners:
        return element("circle", label, cx=x, cy=y, r=_RADIUS, class_="mark")
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return element("polygon", label, points=points, class_="mark")
