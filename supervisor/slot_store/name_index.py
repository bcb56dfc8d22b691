"""Names of files by what they have. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

_Key = tuple[str, int]


class NameIndex:
    """Names by the keys that each was added with."""

    def __init__(self) -> None:
        self._names: defaultdict[_Key, set[str]] = defaultdict(set)

    def add(self, keys: Iterable[_Key], name: str) -> None:
        for key in keys:
            self._names[key].add(name)

    def remove(self, keys: Iterable[_Key], name: str) -> None:
        for key in keys:
            self._names[key].discard(name)
            if not self._names[key]:
                del self._names[key]

    def find(self, keys: Iterable[_Key]) -> list[str]:
        """Return the names that were added with one of the keys."""
        return sorted({name for key in keys for name in self._names.get(key, ())})
