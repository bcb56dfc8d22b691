"""Whether an instance can be replaced new first, and how else. Pure.

Beside an instance that serves, its successor needs memory of its own for a while. Main memory is
estimated before, because a machine that runs out of it kills whom it likes. Memory of devices is
not: what is free there nobody tells without a start, and a start that fails for want of it hurts
nobody but itself.
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
    """How an instance comes to run something else."""

    ROLLING = auto()
    """A successor is brought up beside it, then it drains."""
    RESTART = auto()
    """It drains and starts again."""
    ON_NEXT_START = auto()
    """Nobody wants it up: it is left alone."""


def strategy_for(facts: InstanceSnapshot, *, has_room: bool) -> ReplaceStrategy:
    """Return how an instance is to be replaced.

    Args:
        facts: The instance.
        has_room: Whether memory allows a second one beside it.
    """
    if not facts.wanted:
        return ReplaceStrategy.ON_NEXT_START
    if facts.state in _SERVING and has_room:
        return ReplaceStrategy.ROLLING
    return ReplaceStrategy.RESTART


def serves(facts: InstanceSnapshot) -> bool:
    """Return whether an instance is in service, or was just now and may be again."""
    return facts.wanted and facts.state in _SERVING


def need_bytes(own_bytes: int, before: Plan, after: Plan) -> int:
    """Return how much main memory a successor takes beside the instance it follows.

    Weights that both map from the same file are in memory once. Its prompt cache is empty at first,
    and the other's leaves before it has filled. What the present instance takes beyond its own
    estimate, its successor will take too.

    Args:
        own_bytes: What the present instance shares with no other process.
        before: What it runs.
        after: What its successor will run.
    """
    coming = after.estimate
    beyond = max(0, own_bytes - before.estimate.own_bytes)
    is_same_file = before.gguf.fingerprint == after.gguf.fingerprint
    weights = 0 if is_same_file and before.gguf.path == after.gguf.path else coming.mapped_bytes
    return coming.own_at_start_bytes + beyond + weights


def fits(need: int, *, available_bytes: int, memory_bytes: int) -> bool:
    """Return whether so many bytes more leave the machine its reserve."""
    return need <= available_bytes - memory_bytes * RESERVE_SHARE
