"""Times how long a request waits for its model (`router.acquire.Loader`)."""

from __future__ import annotations

import functools

from proxy.models import ModelLoader
from proxy.timeline import Timeline


class TimedLoader:
    __slots__ = ("_loader", "_timeline")

    def __init__(self, loader: ModelLoader, timeline: Timeline) -> None:
        self._loader = loader
        self._timeline = timeline

    async def ensure_ready(self, model: str) -> None:
        """As `ModelLoader.ensure_ready`."""
        self._timeline.wait("evict")
        try:
            await self._loader.ensure_ready(model, functools.partial(self._timeline.wait, "load"))
        finally:
            self._timeline.wait()
