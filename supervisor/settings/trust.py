"""Checks which user owns a settings file, and which others can write it.

A settings file names programs to run. So one that is found in the current directory is read only
where no one but the user and root can have written it; one that is named is read with a warning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor.host.accounts import private_gid

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Access:
    what: str
    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class User:
    """The effective user.

    Attributes:
        private_gid: The group that only this user is in, or None. Systems that give each user such
            a group make files writable by it (umask 002). Root has none.
    """

    uid: int
    private_gid: int | None = None


def doubts(places: tuple[Access, ...], user: User) -> str | None:
    """Return the first reason not to trust a file; `places` are the file and its directories."""
    return next((reason for place in places for reason in _doubts(place, user)), None)


def _doubts(place: Access, user: User) -> Iterator[str]:
    if place.uid not in {user.uid, _ROOT}:
        yield f"{place.what} belongs to another user (uid {place.uid})"
    if place.mode & stat.S_IWOTH:
        yield f"everybody can write {place.what} (mode {place.mode:o})"
    if place.mode & stat.S_IWGRP and place.gid != user.private_gid:
        yield f"a group can write {place.what} (gid {place.gid}, mode {place.mode:o})"


def see(path: Path) -> tuple[Access, ...]:
    """Return the access to a file, to its directory, and to that of the file behind a symlink.

    Raises:
        OSError: One of them cannot be read.
    """
    real = path.resolve(strict=True)
    directories = dict.fromkeys((path.parent.resolve(), real.parent))
    return (_access(real, "it"), *(_access(one, f"its directory {one}") for one in directories))


def _access(path: Path, what: str) -> Access:
    found = path.stat()
    return Access(what, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def this_user() -> User:
    uid = os.geteuid()
    return User(uid, private_gid(uid) if uid != _ROOT else None)
