"""What the dashboard needs of the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class DashboardHost(Protocol):
    @property
    def vendor(self) -> Path:
        """The folder with the libraries of the page."""
