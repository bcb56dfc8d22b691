"""What the dashboard shows and does of the daemon (proxy.dashboard.host.DashboardHost)."""

from __future__ import annotations

from pathlib import Path

from supervisor.host.paths import shipped


class DashboardHostAdapter:
    @property
    def vendor(self) -> Path:
        return shipped("vendor")
