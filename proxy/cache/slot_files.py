"""Which slot files hold most of a prompt. Pure.

The store says which files there are; it bounds them. A file belongs to a conversation, whose turns
identify it, and begins with prompts that other conversations may begin with too; or it is of such a
prefix alone, and small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.cache.fingerprint import SlotFile
from proxy.cache.prefix_tree import PrefixTree
from proxy.cache.prompt import BLOCK_TOKENS, Prompt
from proxy.observe.cache_finding import NoFile

# Before the first restore: 500 tokens a second, and a gigabyte read. Source: SmolLM2-135M on a CPU.
_BYTE_TOKENS: Final = 500 / 1e9
_FEW_TOKENS: Final = 32
# Of the files that hold equally much of a prompt, so many of conversations, and as many of
# prefixes, are compared by their size.
_COMPARED_MAX: Final = 16
# Turns of files that are gone, remembered to say so.
_REMOVED_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """The file from which a prompt is best continued.

    Attributes:
        tokens: Of the prompt, that the file is believed to hold; at least 1.
        blocks: Of the prompt, that it holds.
        cost_tokens: That could be computed while the file is read.
        is_own: Whether the file is of the prompt's conversation.
    """

    file: SlotFile
    tokens: int
    blocks: int
    cost_tokens: int
    is_own: bool

    @property
    def is_quick(self) -> bool:
        """Whether it is read as quickly as a few tokens are computed."""
        return self.cost_tokens <= _FEW_TOKENS

    @property
    def worth_tokens(self) -> int:
        """What it holds, estimated as prompts are, less what could be computed meanwhile."""
        return self.blocks * BLOCK_TOKENS - self.cost_tokens


class SlotFileIndex:
    """The files of all models; `blocks_max` bounds what is remembered of their prompts."""

    def __init__(self, blocks_max: int) -> None:
        self._files: dict[str, SlotFile] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._used = 0
        self._of_none = 0  # of no conversation
        self._by_turn: dict[tuple[str, int], str] = {}
        self._byte_tokens: dict[str, float] = {}
        self._removed: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._prompts = PrefixTree(blocks_max, blocks_max)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def add(self, file: SlotFile) -> None:
        """Add a file, or replace what is known of it."""
        self.remove((file.name,))
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        if not file.fingerprint.turn_hashes:
            self._of_none |= bit
        self._files[file.name], self._bits[file.name], self._names[bit] = file, bit, file.name
        for turn_hash in _resumable(file):
            self._by_turn[file.cache_key, turn_hash] = file.name
            self._removed.pop((file.cache_key, turn_hash), None)
        if not file.is_recurrent:
            self._prompts.add(file.fingerprint.blocks, bit)

    def remove(self, names: Iterable[str]) -> None:
        """Forget files; unknown names are ignored."""
        gone = 0
        for name in names:
            if (file := self._files.pop(name, None)) is None:
                continue
            bit = self._bits.pop(name)
            gone |= bit
            del self._names[bit]
            for turn_hash in _resumable(file):
                if self._by_turn.get((file.cache_key, turn_hash)) == name:
                    del self._by_turn[file.cache_key, turn_hash]
                    self._removed[file.cache_key, turn_hash] = None
        while len(self._removed) > _REMOVED_MAX:
            self._removed.popitem(last=False)
        if gone:
            self._prompts.remove(gone)
            self._used &= ~gone
            self._of_none &= ~gone

    def set_restore_cost(self, cache_key: str, byte_tokens: float) -> None:
        """Note how many tokens of a prompt are computed in the time of reading a byte."""
        self._byte_tokens[cache_key] = byte_tokens

    def find(
        self, cache_key: str, prompt: Prompt, session: int | None = None
    ) -> SavedPrompt | None:
        """Return the file that engines of a cache key can best go on from, if there is one."""
        if own := self._own(cache_key, prompt, session):
            return own
        best: SavedPrompt | None = None
        for blocks, holders in reversed(self._prompts.levels(prompt.blocks)):
            if best and blocks * BLOCK_TOKENS <= best.worth_tokens:
                break
            if found := self._smallest(cache_key, holders):
                saved = self._saved(found, prompt, blocks, is_own=False)
                best = saved if best is None or saved.worth_tokens > best.worth_tokens else best
        return best

    def tokens(self, cache_key: str, turn_hashes: Iterable[int]) -> int:
        """Return the most tokens that a file of a conversation has."""
        names = (self._by_turn.get((cache_key, turn_hash)) for turn_hash in turn_hashes)
        return max((self._files[name].tokens for name in names if name), default=0)

    def why_missing(self, cache_key: str, turn_hashes: Collection[int]) -> NoFile | None:
        """Return why no file of a conversation can be restored; None where that is not known."""
        others = {file.cache_key for file in self._files.values()} - {cache_key}
        if any(
            (other, turn_hash) in self._by_turn for other in others for turn_hash in turn_hashes
        ):
            return NoFile.OTHER_BUILD
        is_removed = any((cache_key, turn_hash) in self._removed for turn_hash in turn_hashes)
        return NoFile.DELETED if is_removed else None

    def _own(self, cache_key: str, prompt: Prompt, session: int | None) -> SavedPrompt | None:
        """Return the latest file of the prompt's conversation that the prompt goes on from."""
        hashes = (*reversed(prompt.turn_hashes), *(() if session is None else (session,)))
        for turn_hash in hashes:
            name = self._by_turn.get((cache_key, turn_hash))
            file = self._files[name] if name else None
            if file is not None and _continues(prompt.blocks, file):
                blocks = len(file.fingerprint.blocks) or file.tokens // BLOCK_TOKENS
                return self._saved(file, prompt, min(blocks, len(prompt.blocks)), is_own=True)
        return None

    def _saved(self, file: SlotFile, prompt: Prompt, blocks: int, *, is_own: bool) -> SavedPrompt:
        tokens = min(file.tokens, prompt.tokens if is_own else blocks * BLOCK_TOKENS)
        cost = self._byte_tokens.get(file.cache_key, _BYTE_TOKENS) * file.size_bytes
        return SavedPrompt(file, tokens, blocks, round(cost), is_own)

    def _smallest(self, cache_key: str, holders: int) -> SlotFile | None:
        of_none = _bits(holders & self._of_none, _COMPARED_MAX)
        of_conversations = _bits(holders & ~self._of_none, _COMPARED_MAX)
        found = (self._files[self._names[bit]] for bit in (*of_none, *of_conversations))
        fitting = (file for file in found if file.cache_key == cache_key)
        return min(fitting, key=lambda file: file.size_bytes, default=None)


def _resumable(file: SlotFile) -> Sequence[int]:
    """Return the turns from which a file is continued; a recurrent state cannot be cut back."""
    turn_hashes = file.fingerprint.turn_hashes
    return turn_hashes[-1:] if file.is_recurrent else turn_hashes


def _continues(blocks: Sequence[int], file: SlotFile) -> bool:
    """Whether a prompt begins with the last answered prompt of a file."""
    ours = file.fingerprint.blocks
    return not ours or (len(ours) <= len(blocks) and blocks[len(ours) - 1] == ours[-1])


def _bits(holders: int, most: int) -> Iterable[int]:
    while holders and most:
        bit = holders & -holders
        yield bit
        holders ^= bit
        most -= 1
