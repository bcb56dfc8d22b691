"""Users and groups of this machine. Source: getpwuid(3), getgrgid(3); Windows has neither."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
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
    """Return the group that has the name of a user and no other member, or None."""
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
