"""Clients from npm and PyPI, each in a directory of the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import platformdirs

_INSTALL_MAX_S: Final = 600


def install(package: str, *, is_python: bool) -> Path:
    """Install the newest version of a package; return the directory of its programs."""
    directory = Path(platformdirs.user_cache_dir("llama-corral")) / "clients" / Path(package).name
    directory.mkdir(parents=True, exist_ok=True)
    return _from_pypi(package, directory) if is_python else _from_npm(package, directory)


def _from_pypi(package: str, directory: Path) -> Path:
    programs = directory / "bin"
    if not (programs / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(programs / "pip"), "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, package], check=True, timeout=_INSTALL_MAX_S)
    return programs


def _from_npm(package: str, directory: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is missing; install node and npm")
    options = ["--prefix", str(directory), "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([npm, "install", *options, package], check=True, timeout=_INSTALL_MAX_S)
    return directory / "node_modules" / ".bin"


def environment(home: Path, programs: Path, more: Mapping[str, str]) -> dict[str, str]:
    """An environment with a new home directory, in which nothing reaches beyond this machine."""
    path = os.pathsep.join((str(programs), os.environ.get("PATH", os.defpath)))
    nowhere = "http://127.0.0.1:9"  # discard: anything that a client sends elsewhere is refused
    return {
        "HOME": str(home),
        "PATH": path,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "CI": "1",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        "IS_SANDBOX": "1",
        **more,
    }
