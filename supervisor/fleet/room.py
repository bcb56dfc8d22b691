"""Whether an instance can be replaced new first, and how else. Pure.

Beside an instance that serves, its successor needs memory of its own for a while. Main memory is
estimated before, because a machine that runs out of it kills whom it likes. Memory of devices is
not: what is free there nobody tells without a start, and a start that fails for want of it hurts
nobody but itself.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from supervisor.life.facts import InstanceFacts
from supervisor.life.lifecycle import State
from supervisor.profile.plan import Plan

# Left free for everything else on the machine.
_RESERVE_SHARE: Final = 0.05
_SERVING: Final = frozenset({State.READY, State.UNWELL})


class Way(Enum):
    """How an instance comes to run something else."""

    NEW_FIRST = auto()
    """A successor is brought up beside it, then it drains."""
    IN_PLACE = auto()
    """It drains and starts again."""
    AT_NEXT_START = auto()
    """Nobody wants it up: it is left alone."""


def way(facts: InstanceFacts, *, has_room: bool) -> Way:
    """Return how an instance is to be replaced.

    Args:
        facts: The instance.
        has_room: Whether memory allows a second one beside it.
    """
    if not facts.wanted:
        return Way.AT_NEXT_START
    if facts.state in _SERVING and has_room:
        return Way.NEW_FIRST
    return Way.IN_PLACE


def serves(facts: InstanceFacts) -> bool:
    """Return whether an instance is in service, or was just now and may be again."""
    return facts.wanted and facts.state in _SERVING


def need_bytes(own_bytes: int, before: Plan, after: Plan) -> int:
    """Return how much main memory a successor takes beside the instance it follows.

    Weights that both map from the same file are in memory once. What an instance has of its own is
    cache and buffers, which grow with the context.

    Args:
        own_bytes: What the present instance shares with no other process.
        before: What it runs.
        after: What its successor will run.
    """
    growth = max(1.0, after.ctx_size / before.ctx_size) if before.ctx_size else 1.0
    is_same_file = before.gguf.fingerprint == after.gguf.fingerprint
    weights = 0 if is_same_file and before.gguf.path == after.gguf.path else after.gguf.tensor_bytes
    return int(own_bytes * growth) + weights


def fits(need: int, *, available_bytes: int, memory_bytes: int) -> bool:
    """Return whether so many bytes more leave the machine its reserve."""
    return need <= available_bytes - memory_bytes * _RESERVE_SHARE
