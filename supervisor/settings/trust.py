"""Whether a settings file can be trusted: who owns it, and who else can write it.

A settings file names programs that are run, so that a file which happens to lie in the current
directory counts only where nobody but the user and root can have written it. A file that was named
counts as it is; what is doubtful about it is said.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Access:
    """Who owns a file or a directory, and who can write it.

    Attributes:
        what: As in `it` or `its directory /tmp`.
        uid: Its owner.
        gid: Its group.
        mode: Its permission bits.
    """

    what: str
    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class User:
    """Who reads the settings.

    Attributes:
        uid: The effective user.
        private_gid: The group that only this user is in, or None. Systems that give each user such
            a group make files writable by it (umask 002). Root has none.
    """

    uid: int
    private_gid: int | None = None


def doubts(places: tuple[Access, ...], user: User) -> str | None:
    """Return the first reason not to trust a file, as a clause; None where there is none.

    Args:
        places: The file, and the directories in which another could take its place.
        user: Who is to trust it.
    """
    return next((reason for place in places for reason in _doubts(place, user)), None)


def _doubts(place: Access, user: User) -> Iterator[str]:
    if place.uid not in {user.uid, _ROOT}:
        yield f"{place.what} belongs to another user (uid {place.uid})"
    if place.mode & stat.S_IWOTH:
        yield f"everybody can write {place.what} (mode {place.mode:o})"
    if place.mode & stat.S_IWGRP and place.gid != user.private_gid:
        yield f"a group can write {place.what} (gid {place.gid}, mode {place.mode:o})"


def see(path: Path) -> tuple[Access, ...]:
    """Return the access to a file, to where it is found, and to where it really is.

    Raises:
        OSError: One of them cannot be looked at.
    """
    real = path.resolve(strict=True)
    directories = dict.fromkeys((path.parent.resolve(), real.parent))
    return (_access(real, "it"), *(_access(one, f"its directory {one}") for one in directories))


def _access(path: Path, what: str) -> Access:
    found = path.stat()
    return Access(what, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def this_user() -> User:
    """Return who runs this program."""
    uid = os.geteuid()
    return User(uid, _private_gid(uid) if uid != _ROOT else None)


def _private_gid(uid: int) -> int | None:
    try:
        account = pwd.getpwuid(uid)
        group = grp.getgrgid(account.pw_gid)
    except KeyError:
        return None
    is_private = group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}
    return group.gr_gid if is_private else None
