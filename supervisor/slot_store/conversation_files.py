"""Which slot files are of one conversation. Pure.

A file has the hashes of the last turns that it was saved after. Those of a conversation that was
saved several times, or went on in two ways, share some of them with the next, not all with each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from proxy.prompt_cache.fingerprint import decode_fingerprint
from supervisor.errors import NoSuchConversation
from supervisor.slot_store.manifest import Manifest

# The turns of each file, by its name.
Turns = Mapping[str, Collection[int]]


def turns_of(saved: Iterable[Manifest]) -> Turns:
    return {one.name: decode_fingerprint(one.fingerprint).turn_hashes for one in saved}


def file_named(files: Turns, name: str) -> str:
    """Return the name of a file by its beginning.

    Raises:
        NoSuchConversation: No file has it, or several do.
    """
    found = [one for one in files if name and one.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} saved conversations begin" if found else "no saved conversation begins"
    raise NoSuchConversation(f"{what} with {name!r}", hint="corral slots list has their names")


def of_conversation(files: Turns, turns: Collection[int]) -> tuple[list[str], frozenset[int]]:
    """Return the files that share a turn with these, or with one that does; and all their turns."""
    found, known, left = list[str](), {*turns}, dict(files)
    while more := [name for name, its in left.items() if known.intersection(its)]:
        for name in more:
            known.update(left.pop(name))
        found += more
    return found, frozenset(known)
