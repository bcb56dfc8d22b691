"""The table of metrics in `docs/metrics.md`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
_ROW: Final = re.compile(r"\| `([A-Za-z_:]+)` \| (counter|gauge|histogram) \|(.*?)\| (.+) \|")
_LABEL: Final = re.compile(r"`(\w+)`")
_PARTS: Final = ("bucket", "count", "sum")


@dataclass(frozen=True)
class Documented:
    """One metric, by the name that queries use; of a histogram, without `_bucket`."""

    name: str
    type: str
    labels: frozenset[str]
    help: str

    @property
    def family(self) -> str:
        """Its name in OpenMetrics."""
        return self.name.removesuffix("_total")

    @property
    def series(self) -> list[str]:
        if self.type == "histogram":
            return [f"{self.name}_{part}" for part in _PARTS]
        return [self.name]


def documented_metrics() -> list[Documented]:
    rows = (_ROW.fullmatch(line) for line in PAGE.read_text("utf-8").splitlines())
    return [
        Documented(row[1], row[2], frozenset(_LABEL.findall(row[3])), row[4]) for row in rows if row
    ]
