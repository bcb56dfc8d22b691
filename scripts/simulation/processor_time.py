"""Processor time of this thread in the code of fronts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from proxy.cache.holders import RemotePrefixes
from proxy.cache.index import PrefixIndex
from proxy.cache.remote_prefixes import read_digest
from proxy.nodes import monitor
from proxy.router.queue import SlotAssignment
from proxy.router.router import Router

P = ParamSpec("P")
R = TypeVar("R")


class ProcessorTimes:
    """In nanoseconds.

    Attributes:
        decisions: One each time that requests wait and a slot is free: look-up, choice and lease.
        ends: One for each response: learning from it, without the following decisions.
        digests: Several for each digest with news: to parse, to add, and to forget.
    """

    def __init__(self) -> None:
        self.decisions = array("q")
        self.ends = array("q")
        self.digests = array("q")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within this block."""
        assign = self._timed(SlotAssignment.assign, self.decisions)
        finish = self._timed(Router.finish, self.ends, without=self.decisions)
        read = self._timed(read_digest, self.digests)
        add = self._timed(PrefixIndex.add_remote, self.digests)
        forget = self._timed(RemotePrefixes.forget, self.digests)
        with (
            patch.object(SlotAssignment, "assign", assign),
            patch.object(Router, "finish", finish),
            patch.object(monitor, "read_digest", read),
            patch.object(PrefixIndex, "add_remote", add),
            patch.object(RemotePrefixes, "forget", forget),
        ):
            yield

    def _timed(
        self, function: Callable[P, R], times: array[int], without: Sequence[int] = ()
    ) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            inner, began = len(without), time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                times.append(took - sum(without[inner:]))

        return run
