"""How an instance is replaced. Pure.

A successor that starts beside an instance needs memory of its own for a while. Main memory is
estimated first, because a machine that runs out of it kills any process. Device memory is not:
what is free there is unknown without a start, and a start that fails for want of it harms nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from supervisor.flags.plan import Plan
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.memory.fit import RESERVE_SHARE

_SERVING: Final = frozenset({State.READY, State.UNHEALTHY})


class ReplaceStrategy(Enum):
    """How an instance comes to run with new settings."""

    ROLLING = auto()
    """A successor starts beside it, then it drains."""
    RESTART = auto()
    """It drains and starts again."""
    ON_NEXT_START = auto()
    """It is not wanted, so nothing happens now."""


def strategy_for(snapshot: InstanceSnapshot, *, has_room: bool) -> ReplaceStrategy:
    if not snapshot.wanted:
        return ReplaceStrategy.ON_NEXT_START
    if snapshot.state in _SERVING and has_room:
        return ReplaceStrategy.ROLLING
    return ReplaceStrategy.RESTART


def serves(snapshot: InstanceSnapshot) -> bool:
    return snapshot.wanted and snapshot.state in _SERVING


def need_bytes(own_bytes: int, before: Plan, after: Plan) -> int:
    """Return how much main memory a successor takes beside the instance that it replaces.

    Weights that both map from one file are in memory once. Its prompt cache is empty at first, and
    the other's is freed before it has filled. What the present instance takes beyond its estimate,
    its successor will take too.

    `own_bytes` is memory of the present instance that it shares with no file.
    """
    coming = after.estimate
    beyond = max(0, own_bytes - before.estimate.own_bytes)
    is_same_file = before.gguf.fingerprint == after.gguf.fingerprint
    weights = 0 if is_same_file and before.gguf.path == after.gguf.path else coming.mapped_bytes
    return coming.own_at_start_bytes + beyond + weights


def fits(need: int, *, available_bytes: int, memory_bytes: int) -> bool:
    return need <= available_bytes - memory_bytes * RESERVE_SHARE
