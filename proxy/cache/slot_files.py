"""The slot files that hold most of a prompt. Pure.

The slot store reports its files and bounds them. A file either belongs to a conversation, is
identified by its turns, and begins with prompts that other conversations may share; or it holds
such a prefix alone, and is small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.cache.fingerprint import SlotFile
from proxy.cache.host_cache import continues
from proxy.cache.prefix_tree import PrefixTree
from proxy.cache.prompt import BLOCK_TOKENS, Prompt
from proxy.observe.cache_finding import NoFile

# Assumed before the first restore: 500 tokens/s computed, 1 GB/s read. Source: SmolLM2-135M on a
# CPU.
_BYTE_TOKENS: Final = 500 / 1e9
_FEW_TOKENS: Final = 32
# Of the files with equally many tokens of a prompt, at most 16 of conversations and 16 of prefixes
# are compared by size.
_COMPARED_MAX: Final = 16
# Turns of removed files that are remembered, to explain a miss.
_REMOVED_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """The best file to continue a prompt from.

    Attributes:
        tokens: Tokens of the prompt that the file should hold, at least 1.
        cost_tokens: Tokens that could be computed in the time of reading the file.
    """

    file: SlotFile
    tokens: int
    blocks: int
    cost_tokens: int
    is_own: bool

    @property
    def is_quick(self) -> bool:
        return self.cost_tokens <= _FEW_TOKENS

    @property
    def worth_tokens(self) -> int:
        """Estimated tokens of the prompt in it, less `cost_tokens`."""
        return self.blocks * BLOCK_TOKENS - self.cost_tokens


class SlotFileIndex:
    """The files of all models; `blocks_max` bounds the index of their prompts."""

    def __init__(self, blocks_max: int) -> None:
        self._files: dict[str, SlotFile] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._used = 0
        self._without_conversation = 0  # of no conversation
        self._by_turn: dict[tuple[str, int], str] = {}
        self._byte_tokens: dict[str, float] = {}
        self._removed: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._prompts = PrefixTree(blocks_max, blocks_max)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def add(self, file: SlotFile) -> None:
        """Add or replace a file."""
        self.remove((file.name,))
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        if not file.fingerprint.turn_hashes:
            self._without_conversation |= bit
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
            self._without_conversation &= ~gone

    def set_restore_cost(self, cache_key: str, byte_tokens: float) -> None:
        """Set the number of prompt tokens computed in the time of reading one byte."""
        self._byte_tokens[cache_key] = byte_tokens

    def find(
        self, cache_key: str, prompt: Prompt, session: int | None = None
    ) -> SavedPrompt | None:
        """Return the file that engines of a cache key can best continue from, if any."""
        if own := self._find_own_file(cache_key, prompt, session):
            return own
        best: SavedPrompt | None = None
        for blocks, holders in reversed(self._prompts.levels(prompt.blocks)):
            if best and blocks * BLOCK_TOKENS <= best.worth_tokens:
                break
            if found := self._smallest(cache_key, holders):
                saved = self._to_saved_prompt(found, prompt, blocks, is_own=False)
                best = saved if best is None or saved.worth_tokens > best.worth_tokens else best
        return best

    def tokens(self, cache_key: str, turn_hashes: Iterable[int]) -> int:
        names = (self._by_turn.get((cache_key, turn_hash)) for turn_hash in turn_hashes)
        return max((self._files[name].tokens for name in names if name), default=0)

    def why_missing(self, cache_key: str, turn_hashes: Collection[int]) -> NoFile | None:
        """Return why no file of a conversation can be restored; None if unknown."""
        others = {file.cache_key for file in self._files.values()} - {cache_key}
        if any(
            (other, turn_hash) in self._by_turn for other in others for turn_hash in turn_hashes
        ):
            return NoFile.OTHER_BUILD
        is_removed = any((cache_key, turn_hash) in self._removed for turn_hash in turn_hashes)
        return NoFile.DELETED if is_removed else None

    def _find_own_file(
        self, cache_key: str, prompt: Prompt, session: int | None
    ) -> SavedPrompt | None:
        """Return the newest file of this conversation whose content is a prefix of the prompt."""
        hashes = (*reversed(prompt.turn_hashes), *(() if session is None else (session,)))
        for turn_hash in hashes:
            name = self._by_turn.get((cache_key, turn_hash))
            file = self._files[name] if name else None
            if file is not None and continues(prompt.blocks, file.fingerprint.blocks):
                blocks = len(file.fingerprint.blocks) or file.tokens // BLOCK_TOKENS
                return self._to_saved_prompt(
                    file, prompt, min(blocks, len(prompt.blocks)), is_own=True
                )
        return None

    def _to_saved_prompt(
        self, file: SlotFile, prompt: Prompt, blocks: int, *, is_own: bool
    ) -> SavedPrompt:
        tokens = min(file.tokens, prompt.tokens if is_own else blocks * BLOCK_TOKENS)
        cost = self._byte_tokens.get(file.cache_key, _BYTE_TOKENS) * file.size_bytes
        return SavedPrompt(file, tokens, blocks, round(cost), is_own)

    def _smallest(self, cache_key: str, holders: int) -> SlotFile | None:
        of_none = _bits(holders & self._without_conversation, _COMPARED_MAX)
        of_conversations = _bits(holders & ~self._without_conversation, _COMPARED_MAX)
        found = (self._files[self._names[bit]] for bit in (*of_none, *of_conversations))
        fitting = (file for file in found if file.cache_key == cache_key)
        return min(fitting, key=lambda file: file.size_bytes, default=None)


def _resumable(file: SlotFile) -> Sequence[int]:
    """Return the turns that a file can be continued from; a recurrent state cannot be cut back."""
    turn_hashes = file.fingerprint.turn_hashes
    return turn_hashes[-1:] if file.is_recurrent else turn_hashes


def _bits(holders: int, most: int) -> Iterable[int]:
    while holders and most:
        bit = holders & -holders
        yield bit
        holders ^= bit
        most -= 1
