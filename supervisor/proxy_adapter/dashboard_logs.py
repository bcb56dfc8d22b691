"""The logs that the dashboard shows: the daemon's, and those of instances, by their names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Final

from proxy.errors import NotFound
from supervisor.host.paths import Directories
from supervisor.process.log_file import follow, tail

_DAEMON: Final = "daemon"


class DashboardLogs:
    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    def sources(self, instances: Iterable[str]) -> dict[str, Path]:
        """The logs that there are, by name."""
        found = {one: self._directories.engine_log(one) for one in instances}
        known = {_DAEMON: self._directories.daemon_log, **found}
        return {name: path for name, path in known.items() if path.is_file()}

    async def last_lines(
        self, source: str, lines: int, instances: Iterable[str]
    ) -> tuple[str, ...]:
        """The last lines of a log; raises NotFound."""
        path = self._path(source, instances)
        return await asyncio.to_thread(tail, path, lines)

    def lines(self, source: str, lines: int, instances: Iterable[str]) -> AsyncGenerator[str, None]:
        """Its last lines, then each new one; raises NotFound."""
        return follow(self._path(source, instances), lines)

    def _path(self, source: str, instances: Iterable[str]) -> Path:
        """Look a log up: no name from outside becomes a path."""
        sources = self.sources(instances)
        if source not in sources:
            known = ", ".join(sources) or "none"
            raise NotFound(f"there is no log of {source[:80]!a}; there are: {known}")
        return sources[source]
