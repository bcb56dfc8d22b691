"""Resource limits of this process. Source: getrlimit(2); Windows has none of them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple

_resource: Final = import_module("resource") if find_spec("resource") else None
# Enough for any number of clients, and not so many that programs which close them all are slow.
_FILES: Final = 65_536


class Limit(NamedTuple):
    """In the unit of the limit; None: unlimited."""

    soft: int | None
    hard: int | None


def has_limit(name: str) -> bool:
    return hasattr(_resource, name)


def limit(name: str) -> Limit:
    """Return the limit `name`, such as `RLIMIT_NOFILE`; unlimited on a system that lacks it."""
    if _resource is None or not has_limit(name):
        return Limit(None, None)
    found = _resource.getrlimit(getattr(_resource, name))
    return Limit(*(None if value == _resource.RLIM_INFINITY else value for value in found))


def set_soft_limit(name: str, value: int) -> None:
    """Set a soft limit, to the hard limit at most; nothing on a system that does not have it.

    Raises:
        ValueError: The system refuses the value.
    """
    if _resource is not None and has_limit(name):
        number = getattr(_resource, name)
        _, hard = _resource.getrlimit(number)
        value = value if hard == _resource.RLIM_INFINITY else min(value, hard)
        _resource.setrlimit(number, (value, hard))


def raise_file_limit() -> None:
    """Raise the soft limit of open files and sockets as far as the hard limit allows.

    Source: systemd's notes on RLIMIT_NOFILE: the soft limit is mostly 1 024 for select(2) only.
    """
    soft, _ = limit("RLIMIT_NOFILE")
    if soft is not None and soft < _FILES:
        # macOS has a maximum below the hard limit.
        with suppress(ValueError, OSError):
            set_soft_limit("RLIMIT_NOFILE", _FILES)
