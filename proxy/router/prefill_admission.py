"""When a prompt may begin on an instance whose running streams come first. Pure.

An engine computes prompts in the same passes in which it decodes, so every pass with prompt tokens
is a longer pause of all running streams. Two prompts at once make none of the two faster: the
engine computes the second after the first. So while sequences decode, one prompt begins after the
other, the one with the fewest tokens to compute first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from proxy.router.fair_queue import QueueEntry

# So few are computed within about one pass.
FEW_TOKENS: Final = 64
# The longest wait for other prompts, unless half of the request's own timeout is shorter.
WAIT_MAX_S: Final = 10.0
_TIMEOUT_SHARE: Final = 0.5
# Places that the longest prompt loses to the shortest: so many requests of each client overtake it.
_OVERTAKEN: Final = 4.0

P = TypeVar("P", bound=QueueEntry)


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """Requests of one instance.

    Attributes:
        prefilling: Those of whose prompts it still has to compute more than a few tokens.
        decoding: Those whose first token has arrived.
    """

    prefilling: int
    decoding: int


def prefill_wait_s(work: InstanceWork, new_tokens: int, waited_s: float, timeout_s: float) -> float:
    """Return how long a prompt waits for another one at most; 0 where it may begin.

    Args:
        work: Of the instance.
        new_tokens: Tokens of the prompt that it is expected to compute.
        waited_s: How long the request has waited already.
        timeout_s: How long it may wait.
    """
    if new_tokens <= FEW_TOKENS or not (work.prefilling and work.decoding):
        return 0.0
    return max(0.0, min(WAIT_MAX_S, _TIMEOUT_SHARE * timeout_s) - waited_s)


def shortest_first(entries: Sequence[P], new_tokens: Callable[[P], int]) -> list[P]:
    """Order waiting requests by the tokens to compute, without leaving any behind.

    `entries` are in the order of the queue. Priorities keep their turns. A long prompt moves back
    by at most four turns of the queue, whose order of turns ages: each that is served makes those
    that wait older than all newcomers.
    """
    most = max(map(new_tokens, entries), default=0) or 1

    def turn(entry: P) -> tuple[float, int]:
        return entry.tag + _OVERTAKEN * new_tokens(entry) / most, entry.number

    ordered = sorted(entries, key=turn)
    turns = {
        priority: iter([one for one in ordered if one.priority == priority])
        for priority in {one.priority for one in entries}
    }
    return [next(turns[entry.priority]) for entry in entries]
