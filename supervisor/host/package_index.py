"""Downloads a wheel from the package index that pip is set to use, and resumes a broken download.

pip itself downloads where the index has no JSON (PEP 691), is not reached by HTTP, or lacks the
wheel: it may have more sources.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from supervisor.errors import DownloadFailed
from supervisor.host import resumed_download
from supervisor.host.resumed_download import Progress, RemoteFile

# In the help of pip, of `--index-url`: no other option has an address as its default.
_DEFAULT_INDEX: Final = re.compile(r"\(default (https?://[^\s()]{1,500})\)")
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_PAGE_MAX_BYTES: Final = 16 * 1024**2
_PIP_DOWNLOAD_TIMEOUT_S: Final = 3600
_PIP_TIMEOUT_S: Final = 30
_PIP_LINES_SHOWN: Final = 3
_RETRY: Final = "run the same command again"


def download(requirement: str, directory: Path, size_max_bytes: int, progress: Progress) -> None:
    """Put the wheel of `NAME==VERSION` into a directory; it gets its name when it is whole.

    Args:
        requirement: The package and its version.
        directory: Where to put it; a `.part` file there is continued.
        size_max_bytes: A larger wheel is refused.
        progress: Receives bytes done and bytes in all.

    Raises:
        DownloadFailed: The download broke, or the wheel is too large or not the index's file.
        OSError: The directory cannot be written.
    """
    pip = _pip_settings()
    context = ssl.create_default_context(cafile=pip["cert"]) if "cert" in pip else True
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True, verify=context) as client:
        index = pip.get("index-url") or _default_index()
        wheel = _find(client, index, requirement) if index else None
        if wheel is None:
            pip_download(requirement, directory)
            return
        if wheel.size_bytes > size_max_bytes:
            raise DownloadFailed(f"{wheel.name} has {wheel.size_bytes} bytes: more than it may")
        resumed_download.download(client, wheel, directory, progress, "the index")


def _find(client: httpx.Client, index: str, requirement: str) -> RemoteFile | None:
    """Return the wheel of a requirement; None where the index does not list it as JSON.

    Source: PEP 691, PEP 503 (names), PEP 427 (file names).
    """
    name, _, version = requirement.partition("==")
    url = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    try:
        with client.stream("GET", url, headers={"Accept": _JSON}) as response:
            response.raise_for_status()
            page = b""
            for chunk in response.iter_bytes():
                page += chunk
                if len(page) > _PAGE_MAX_BYTES:
                    return None
        wheels = (one for one in json.loads(page)["files"] if one["filename"].endswith(".whl"))
        found = next(one for one in wheels if one["filename"].split("-")[1] == version)
        return RemoteFile(
            Path(found["filename"]).name,
            response.url.join(found["url"]),
            found["hashes"]["sha256"],
            found["size"],
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, StopIteration):
        return None


def _pip_settings() -> Mapping[str, str]:
    """Return pip's own settings, those of the environment first; none where pip does not answer."""
    pairs = [line.partition("=") for line in _pip("config", "list").splitlines()]
    ranked = sorted(pairs, key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: "".join(shlex.split(value)) for key, _, value in ranked}


def _default_index() -> str | None:
    """Return the index that pip uses without a setting; None where pip does not say."""
    found = _DEFAULT_INDEX.search(_pip("download", "--help"))
    return found[1] if found else None


def _pip(*arguments: str) -> str:
    """Return what pip prints; nothing where it does not answer."""
    argv = [sys.executable, "-m", "pip", *arguments]
    wide = {**os.environ, "COLUMNS": "1000"}  # lines are not broken
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False, env=wide
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def pip_download(requirement: str, directory: Path) -> None:
    """Let pip put one wheel into a directory; pip names it only when it is whole.

    Source: `pip download` moves finished files out of its own temporary directory.

    Raises:
        DownloadFailed: pip failed; says how.
    """
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PIP_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(
            f"pip did not download {requirement} within an hour", hint=_RETRY
        ) from error
    if done.returncode:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-_PIP_LINES_SHOWN:])
        raise DownloadFailed(
            f"pip could not download {requirement}:\n{last_lines}",
            hint=f"check the network and pip's settings, then {_RETRY}",
        )
