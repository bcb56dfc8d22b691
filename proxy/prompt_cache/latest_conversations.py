"""How many of the latest conversations of a model each process owns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from proxy.prompt_cache.runs import Run

if TYPE_CHECKING:
    from proxy.prompt_cache.conversations import Conversation

# Only the latest conversations of a model count for balance: older ones fill no slot, and a new
# instance must not get all new ones until it owns as many. Of a thousand instances 128 would leave
# most without any, and new conversations with those that were used first.
_LATEST_MIN: Final = 128
_LATEST_PER_INSTANCE: Final = 8


class LatestConversations:
    """Those of one model; some may be of processes that have ended.

    Attributes:
        counts: Conversations of each process.
    """

    def __init__(self) -> None:
        self.counts: Counter[Run] = Counter()
        self._latest: OrderedDict[Conversation, Run] = OrderedDict()
        self._owners: dict[int, int] = {}

    @property
    def owners(self) -> Mapping[int, int]:
        """The sets of processes, by how many conversations they own: 1 and more."""
        return self._owners

    def touch(self, conversation: Conversation, instances: int) -> None:
        """Count a conversation as the latest, for the process that owns it now.

        More count where there are many instances.
        """
        before, now = self._latest.pop(conversation, None), conversation.run
        self._latest[conversation] = now
        if before is not now:
            self._count(now, 1)
            if before:
                self._count(before, -1)
        if len(self._latest) > max(_LATEST_MIN, _LATEST_PER_INSTANCE * instances):
            _, owner = self._latest.popitem(last=False)
            self._count(owner, -1)

    def forget(self, ended: int) -> None:
        """Forget those of a set of processes."""
        for conversation, run in tuple(self._latest.items()):
            if run.bit & ended:
                del self._latest[conversation]
                self._count(run, -1)

    def _count(self, run: Run, change: int) -> None:
        before = self.counts[run]
        self.counts[run] = now = before + change
        if before:
            self._owners[before] &= ~run.bit
        if now:
            self._owners[now] = self._owners.get(now, 0) | run.bit
        else:
            del self.counts[run]
        if before and not self._owners[before]:
            del self._owners[before]
