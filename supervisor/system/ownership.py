"""Finds out whether another user could have written a settings file or a model file.

A settings file names programs to run. So a settings file in the current directory is read only if
only the user and root can have written it; a file that the user names is read with a warning.

A model file of another user is a danger too: C++ code parses GGUF files, and a file that shrinks
while it is mapped kills its engine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_users: Final = import_module("pwd") if find_spec("pwd") else None
_groups: Final = import_module("grp") if find_spec("grp") else None


def user_name(uid: int) -> str:
    """Return the name of a user, or `uid N` if it has none."""
    if _users is not None:
        try:
            return str(_users.getpwuid(uid).pw_name)
        except KeyError:
            pass
    return f"uid {uid}"


def private_gid(uid: int) -> int | None:
    """Return the group with the user's name and no other member, or None."""
    if _users is None or _groups is None:
        return None
    try:
        account = _users.getpwuid(uid)
        group = _groups.getgrgid(account.pw_gid)
    except KeyError:
        return None
    is_private = group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}
    return int(group.gr_gid) if is_private else None


def has_group(name: str) -> bool:
    if _groups is None:
        return False
    try:
        _groups.getgrnam(name)
    except KeyError:
        return False
    return True


_ROOT = 0


# A file or directory as a clause names it, its owner, its group, and its mode.
Access = tuple[str, int, int, int]


def first_doubt(places: tuple[Access, ...], uid: int, private_gid: int | None) -> str | None:
    """Return the first reason why a user should not trust a file, from it and its directories.

    `private_gid` is the group whose only member is the user, or None. Systems with such groups make
    files writable by them (umask 002).
    """
    return next((reason for place in places for reason in _doubts(place, uid, private_gid)), None)


def _doubts(place: Access, uid: int, private_gid: int | None) -> Iterator[str]:
    what, owner, gid, mode = place
    if owner not in {uid, _ROOT}:
        yield f"{what} belongs to another user (uid {owner})"
    if mode & stat.S_IWOTH:
        yield f"everybody can write {what} (mode {mode:o})"
    if mode & stat.S_IWGRP and gid != private_gid:
        yield f"a group can write {what} (gid {gid}, mode {mode:o})"


def read_access(path: Path) -> tuple[Access, ...]:
    """Return access to a file, its directory, and its target's. Raises OSError: unreadable."""
    real = path.resolve(strict=True)
    directories = dict.fromkeys((path.parent.resolve(), real.parent))
    return (
        _access(real, "it"),
        *(_access(directory, f"its directory {directory}") for directory in directories),
    )


def _access(path: Path, what: str) -> Access:
    found = path.stat()
    return what, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def this_user() -> tuple[int, int | None]:
    """Return the effective user and its private group, None for root."""
    uid = os.geteuid()
    return uid, private_gid(uid) if uid != _ROOT else None


# Service accounts, such as Ollama's, have lower numbers. Source: login.defs(5), UID_MIN.
_PEOPLE_FROM: Final = 1000


def foreign_owner(path: Path) -> str | None:
    """Return why a file is another user's; None if ours, root's, a service's, or unreadable."""
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() and found.st_uid >= _PEOPLE_FROM:
        return f"it belongs to another user ({user_name(found.st_uid)}); serve it by its path"
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return None
