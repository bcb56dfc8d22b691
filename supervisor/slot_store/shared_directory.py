"""A directory of slot files that several daemons use, on a network file system for instance.

Nothing is locked and no daemon talks to another. A file appears by rename and never changes. Each
daemon touches a file of its own, `daemons/NAME`; another counts as alive while the time of its file
changes, by the clock of the daemon that looks, so the clocks of machines may differ. Of each slot
file one daemon is in charge, the one whose name and the file's have the highest hash (rendezvous
hashing): it alone deletes the file for age or space. Daemons that list the same files so agree; if
they differ for a while, a file stays, or is deleted twice.

All methods block; `is_in_charge` and `owns` do not.
"""

from __future__ import annotations

import errno
import re
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, field
from xxhash import xxh3_64_intdigest

from supervisor.system import files
from supervisor.system.paths import make_ours, make_private

_BEAT_S: Final = 15.0
# A client of NFS may see times and entries of a directory that are a minute old.
_DEAD_S: Final = 120.0
# A file that a daemon writes grows all the time.
_ABANDONED_S: Final = 900.0
_NAME: Final = "daemon"
_IS_NAME: Final = re.compile("[0-9a-f]{16}")


def in_charge(file: str, daemons: Collection[str]) -> str | None:
    """Return the daemon that deletes a file; None without daemons."""
    return max(daemons, key=lambda name: xxh3_64_intdigest(f"{name} {file}".encode()), default=None)


@define(eq=False, slots=False)
class SharedDirectory:
    """A directory that daemons share; `own` is the private directory of this daemon."""

    root: Path
    _own: Path
    _clock: Callable[[], float] = time.monotonic
    alive: frozenset[str] = field(default=frozenset(), init=False)
    _beat_at_s: float = field(default=float("-inf"), init=False)
    # By daemon, the time of its file and when that was first seen.
    _seen: dict[str, tuple[int, float]] = field(factory=dict, init=False)
    _stamps: dict[Path, int] = field(factory=dict, init=False)
    _is_settled: bool = field(default=False, init=False)
    _device: int | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        found = str((files.get(self._own, _NAME) or {}).get("name"))
        self.daemon = found if _IS_NAME.fullmatch(found) else secrets.token_hex(8)
        self.alive = frozenset({self.daemon})
        self._daemons = self.root / "daemons"
        self._heartbeat = self._daemons / self.daemon

    def beat(self) -> None:
        """Show that this daemon is alive, and see which others are.

        Raises OSError, also if the directory was on a file system that is no longer mounted, and
        AccessDenied: it is not of this user.
        """
        now_s = self._clock()
        make_ours(self.root)
        device = self.root.stat().st_dev
        if self._device not in {None, device} and not self._heartbeat.exists():
            raise OSError(errno.ENODEV, f"another file system is mounted at {self.root}")
        self._device = device
        if now_s - self._beat_at_s >= _BEAT_S or not self._heartbeat.exists():
            files.put(self._own, _NAME, {"name": self.daemon})  # for after a restart
            make_private(self._daemons)
            self._heartbeat.touch(mode=0o600)
            self._beat_at_s = now_s
        before, self._seen = self._seen, {}
        for path in self._daemons.iterdir():
            try:
                time_ns = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            seen_ns, since_s = before.get(path.name, (0, now_s))
            if time_ns != seen_ns:
                since_s = now_s
            if now_s - since_s < _DEAD_S:
                self._seen[path.name] = time_ns, since_s
            else:
                path.unlink(missing_ok=True)
        self.alive = frozenset({self.daemon, *self._seen})

    def has_changed(self, directories: Collection[Path]) -> bool:
        """Return whether directories may have other entries than at the last call.

        Two entries that are added at once may share a time, so a change is reported twice.
        """
        stamps = {}
        for path in directories:
            try:
                stamps[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        was_settled, self._is_settled = self._is_settled, stamps == self._stamps
        self._stamps = stamps
        return not (was_settled and self._is_settled)

    def end(self) -> None:
        """Tell the others at once that this daemon has ended."""
        with suppress(OSError):
            self._heartbeat.unlink()

    def is_in_charge(self, file: str) -> bool:
        """Return whether this daemon deletes a file if it is too old or worth too little."""
        return in_charge(file, self.alive) == self.daemon

    def owns(self, file: str, daemon: str) -> bool:
        """Return whether a file that `daemon` saved is this daemon's own, or left to it."""
        return daemon == self.daemon or (daemon not in self.alive and self.is_in_charge(file))

    def is_abandoned(self, path: Path) -> bool:
        """Return whether a file has not changed for long, by the clock of the file system."""
        try:
            return self._heartbeat.stat().st_mtime - path.stat().st_mtime > _ABANDONED_S
        except FileNotFoundError:
            return False
