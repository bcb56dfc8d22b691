"""Which slot files are deleted, so that the rest stays within the budget. Pure.

A file is worth the tokens that it is expected to save: those that it holds, and those that were
restored from it lately, times how likely its conversation returns. That falls with the time since
it was used last, as most conversations that return do so soon. A prefix is worth as much more as
conversations begin with it. What is worth least for each byte goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Final

from supervisor.slot_store.catalogue import CataloguedFile
from supervisor.slot_store.policy import DiskBudget

# Of the conversations that did not return in this time, half return in as much again.
_RETURN_S: Final = 3600.0
# What was restored counts half after a day.
_RESTORED_HALF_S: Final = 86_400.0

_Worth = Callable[[CataloguedFile], float]


def to_evict(
    kept: Collection[CataloguedFile], budget: DiskBudget, now: datetime
) -> list[CataloguedFile]:
    """Return what to delete: what is too old, then what is worth least for each byte."""
    young = [one for one in kept if now - one.manifest.used_at <= budget.max_age]
    fitting = _within_budget(young, budget, _worth(young, now))
    names = {one.file.name for one in fitting}
    return [one for one in kept if one.file.name not in names]


def _within_budget(
    kept: list[CataloguedFile], budget: DiskBudget, worth: _Worth
) -> list[CataloguedFile]:
    by_model = groupby(sorted(kept, key=_model), key=_model)
    share_bytes = budget.model_share * budget.size_bytes
    models = [_best(list(found), budget.files_a_model, share_bytes, worth) for _, found in by_model]
    rest = [one for found in models for one in found]
    return _best(rest, budget.files, budget.size_bytes, worth)


def _best(
    kept: list[CataloguedFile], files: int, size_bytes: float, worth: _Worth
) -> list[CataloguedFile]:
    left_bytes = size_bytes - sum(one.file.size_bytes for one in kept)
    if left_bytes >= 0 and len(kept) <= files:
        return kept
    least_first = sorted(kept, key=worth)
    gone = max(0, len(kept) - files)
    left_bytes += sum(one.file.size_bytes for one in least_first[:gone])
    while left_bytes < 0:
        left_bytes += least_first[gone].file.size_bytes
        gone += 1
    return least_first[gone:]


def _worth(kept: Iterable[CataloguedFile], now: datetime) -> _Worth:
    """Return what files are worth for each byte."""
    conversations = _conversations(list(kept))

    def worth(one: CataloguedFile) -> float:
        file, age_s = one.file, max(0.0, (now - one.manifest.used_at).total_seconds())
        restored: float = one.restored_tokens * 0.5 ** (age_s / _RESTORED_HALF_S)
        return_p = _RETURN_S / (_RETURN_S + age_s)
        tokens = (file.tokens + restored) * (1 + conversations[file.name])
        return tokens * return_p / max(1, file.size_bytes)

    return worth


def _conversations(kept: Collection[CataloguedFile]) -> Counter[str]:
    """Return of how many conversations each prefix is the beginning."""
    counts = Counter[str]()
    for prefix in (one.file for one in kept if not one.file.fingerprint.turn_hashes):
        if blocks := prefix.fingerprint.blocks:
            end = len(blocks) - 1
            others = (
                one.file.fingerprint.blocks
                for one in kept
                if one.file.cache_key == prefix.cache_key and one.file is not prefix
            )
            counts[prefix.name] = sum(len(its) > end and its[end] == blocks[end] for its in others)
    return counts


_model = attrgetter("manifest.model")
