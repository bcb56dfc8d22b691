"""The parts of a prompt in order, without their text. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Role = Literal["tools", "system", "user", "assistant", "tool", "text"]

# By the first byte of a part: that of its role, or the separator where it has none, as tools.
_ROLES: Final[Mapping[int, Role]] = MappingProxyType(
    {
        0x1F: "tools",
        ord("s"): "system",
        ord("d"): "system",  # developer
        ord("u"): "user",
        ord("a"): "assistant",
        ord("t"): "tool",
        ord("f"): "tool",  # function
    }
)


# Of parts that conversations have in common: tools and system prompts.
COMMON: Final = frozenset(b"\x1fsd")


class Outline(NamedTuple):
    """Parts of a prompt: tools, then each text, call, result and medium.

    Of a short prompt it has the sizes alone.

    Attributes:
        hashes: Of each part, whatever is before it.
        sizes_bytes: Of each part.
        messages: The number of the client's message that each part is of; -1 where it is of none,
            as tools and the system prompt of some APIs.
        labels: The first byte of each part's role; empty for prompts without roles.
    """

    hashes: Sequence[int]
    sizes_bytes: Sequence[int]
    messages: Sequence[int]
    labels: bytes

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)

    def role(self, part: int) -> Role:
        """Return the role of a part: `tools` for what shapes a prompt, `text` without a role."""
        return _ROLES.get(self.labels[part], "text") if part < len(self.labels) else "text"


class Hashes(NamedTuple):
    """A prompt: its outline, and hashes of its pieces from the start, each with all before it."""

    outline: Outline
    blocks: Sequence[int]


NO_OUTLINE: Final = Outline((), (), (), b"")


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many blocks two prompts have in common, from the start."""
    most = min(len(one), len(other))
    return bisect_left(range(most), 1, key=lambda at: one[at] != other[at])
