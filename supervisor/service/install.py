"""Puts the files of a service into place and has systemd run it, or takes it away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from supervisor.errors import AccessDenied, ServiceFailed
from supervisor.host.files import write_atomic
from supervisor.service.facts import Scope
from supervisor.service.files import SERVICE, SOCKET, ServicePaths
from supervisor.service.systemctl import run, systemctl
from supervisor.service.unit_text import MARK


def install(scope: Scope, files: Mapping[Path, str], paths: ServicePaths, *, start: bool) -> None:
    """Write the files, enable the units and start them; repeating it applies what changed.

    Raises:
        AccessDenied: A file cannot be written.
        ServiceFailed: A file of a user's stands there, or systemd refuses.
    """
    _check_ours(paths)
    systemctl(scope, "show", "--property=Version")  # nothing is written where none answers
    changed = {path.name for path, text in files.items() if _read(path) != text}
    removed = [path for path in paths.all if path not in files and path.exists()]
    if SOCKET in changed or removed:
        _stop(scope, *(path.name for path in (*files, *removed)))
    _remove(scope, removed)
    for path, text in files.items():
        _write(path, text)
        if path.parent == paths.accounts:
            run("systemd-sysusers", str(path))
    units = [name for name in (SOCKET, SERVICE) if paths.units / name in files]
    systemctl(scope, "daemon-reload")
    systemctl(scope, "enable", *units)
    if start:
        for name in units[:-1]:
            systemctl(scope, "start", name)
        systemctl(scope, "restart" if changed else "start", SERVICE)


def uninstall(scope: Scope, paths: ServicePaths) -> tuple[Path, ...]:
    """Stop the service and remove its files; return those that were there.

    Raises:
        AccessDenied: A file cannot be removed.
        ServiceFailed: A file is a user's own, or systemd refuses.
    """
    _check_ours(paths)
    found = tuple(path for path in paths.all if path.exists())
    if found:
        _stop(scope, *(path.name for path in found))
        _remove(scope, found)
        systemctl(scope, "daemon-reload")
    return found


def _stop(scope: Scope, *names: str) -> None:
    """Stop units, the socket first, so that it does not start the service again."""
    for name in (SOCKET, SERVICE):
        if name in names and _is_known(scope, name):
            systemctl(scope, "stop", name)


def _remove(scope: Scope, found: tuple[Path, ...] | list[Path]) -> None:
    for path in found:
        if path.name in {SOCKET, SERVICE} and _is_known(scope, path.name):
            systemctl(scope, "disable", path.name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise AccessDenied(f"cannot remove {path}: {error.strerror}") from error


def _is_known(scope: Scope, name: str) -> bool:
    shown = systemctl(scope, "show", name, "--property=LoadState", "--value")
    return shown.strip() not in {"", "not-found"}


def _check_ours(paths: ServicePaths) -> None:
    for path in paths.all:
        text = _read(path)
        if text is not None and not text.startswith(MARK):
            raise ServiceFailed(
                f"{path} was not written by corral service install",
                hint="move it away, and install again",
            )


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _write(path: Path, text: str) -> None:
    """Write a file that all users can read: it holds no secrets, and systemd warns otherwise."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomic(path, text)
        path.chmod(0o644)
    except OSError as error:
        raise AccessDenied(
            f"cannot write {path}: {error.strerror}",
            hint="sudo corral service install, or corral service install --user",
        ) from error
