"""Where a prompt differs from an earlier one, and how. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.explanation.causes import Cause
from proxy.prompt_cache.outline import Hashes, Outline, Role, shared_blocks
from proxy.prompt_cache.prompt import BLOCK_BYTES

# A client that drops old messages may put a few of its own in their place.
_INSERTED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a prompt from an earlier one.

    Attributes:
        part: The first part that differs.
        message: The client's number of its message; None where it is of none.
        shared_bytes: Equal bytes from the start: at least so many, and less than a block more.
        known_bytes: Of the prompt's parts, those that the earlier one had anywhere, and what took
            the place of its system prompt or its tools.
        dropped: Messages that were left out, for a truncated history.
    """

    cause: Cause
    part: int
    role: Role
    message: int | None
    shared_bytes: int
    known_bytes: int
    dropped: int = 0


def difference(before: Hashes, now: Hashes) -> Difference | None:
    """Return the first difference, or None where one prompt begins with the other."""
    earlier, later = before.outline, now.outline
    part = _first_unequal(earlier.hashes, later.hashes)
    if part in {len(earlier.hashes), len(later.hashes)}:
        return None
    cause, dropped = _cause(earlier, later, part)
    role, message = later.role(part), later.messages[part]
    if cause is Cause.TOOLS_CHANGED:  # also where it has none any more
        role, message = "tools", -1
    replaced = cause in {Cause.SYSTEM_PROMPT_CHANGED, Cause.TOOLS_CHANGED}
    return Difference(
        cause,
        part,
        role,
        message if message >= 0 else None,
        shared_bytes(before, now, part),
        _known_bytes(earlier, later) + (later.sizes_bytes[part] if replaced else 0),
        dropped,
    )


def shared_bytes(before: Hashes, now: Hashes, part: int) -> int:
    """Return how many bytes are equal from the start, if the parts before `part` are."""
    blocks = shared_blocks(before.blocks, now.blocks)
    return max(sum(now.outline.sizes_bytes[:part]), blocks * BLOCK_BYTES)


def _first_unequal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _cause(earlier: Outline, later: Outline, part: int) -> tuple[Cause, int]:
    """Return the cause, and how many messages were left out."""
    roles = {earlier.role(part), later.role(part)}
    if "tools" in roles:
        return Cause.TOOLS_CHANGED, 0
    if dropped := _dropped(earlier, later, part):
        return Cause.HISTORY_TRUNCATED, dropped
    if "system" in roles:
        return Cause.SYSTEM_PROMPT_CHANGED, 0
    return Cause.MESSAGE_CHANGED, 0


def _dropped(earlier: Outline, later: Outline, part: int) -> int:
    """Return how many messages are missing where one of the next parts is a later one of before."""
    places = {one: at for at, one in enumerate(earlier.hashes) if at > part}
    for at in range(part, min(part + _INSERTED_MAX, len(later.hashes))):
        place = places.get(later.hashes[at], at)
        if place > at and earlier.role(part) != "system":
            return max(1, earlier.messages[place] - earlier.messages[part])
    return 0


def _known_bytes(earlier: Outline, later: Outline) -> int:
    known = set(earlier.hashes)
    pairs = zip(later.hashes, later.sizes_bytes, strict=True)
    return sum(size for one, size in pairs if one in known)
