"""Parses references to models: a repository of the hub, a file in one, or another URL. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from supervisor.errors import NoSuchModel
from supervisor.models import file_names

# Source: huggingface_hub, utils/_validators.py, REPO_ID_REGEX.
_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_HOSTS: Final = frozenset({"hf.co", "huggingface.co", "www.huggingface.co"})
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
# /OWNER/NAME/resolve/REVISION/PATH downloads a file, blob shows it, tree lists a directory.
_USER: Final = re.compile(r"^[^/@\s:]{1,256}:[^/@\s]{1,256}@")
_PAGES: Final = frozenset({"resolve", "blob", "raw"})
# Branches, tags and commits, and `refs/pr/1`.
_REVISION: Final = re.compile(r"\w[\w-]*(?:[./][\w-]+)*", re.ASCII)
# The largest models have some 100 shards.
_SHARDS_MAX: Final = 1000
_MAIN: Final = "main"
# Ollama's tag for a quantisation of its choice.
_LATEST: Final = "LATEST"


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository, and its wanted part."""

    repo: str  # OWNER/NAME
    revision: str = _MAIN
    quantisation: str = ""  # in capitals; empty: choose one
    file: str = ""  # a path in the repository; empty: choose one

    def __str__(self) -> str:
        wanted = self.file or self.quantisation
        return f"{self.repo}:{wanted}" if wanted else self.repo


@dataclass(frozen=True, slots=True)
class UrlReference:
    """A file on another server."""

    url: str
    name: str  # the last part of the path, which is safe as a file name

    def __str__(self) -> str:
        return self.name

    @property
    def shards(self) -> tuple[UrlReference, ...]:
        """All shards of the model, or only itself if the model is not split."""
        found = file_names.parse_file_name(self.name)
        head, _, tail = self.url.rpartition(self.name)
        if found is None or not 1 < found.shards <= _SHARDS_MAX or not head:
            return (self,)
        names = [
            f"{found.prefix}-{number:05d}-of-{found.shards:05d}.gguf"
            for number in range(1, found.shards + 1)
        ]
        return tuple(UrlReference(f"{head}{name}{tail}", name) for name in names)


def parse_reference(word: str, endpoint: str = "") -> HubReference | UrlReference:
    """Parse `OWNER/NAME[:QUANT]`, also after `hf:` or `hf.co/`, or a URL; raises NoSuchModel.

    URLs of `endpoint`, the hub in use, mean repositories, as those of huggingface.co do.
    """
    hosts, word = _HOSTS | ({urlsplit(endpoint).netloc} - {""}), word.removeprefix("hf:")
    if "://" not in word:
        host, _, rest = word.partition("/")
        return _repository(rest if host in hosts else word, word)
    parts = urlsplit(word)
    if parts.netloc in hosts:
        return _page([unquote(part) for part in parts.path.strip("/").split("/")], word)
    return _url_reference(word)


def _repository(text: str, word: str) -> HubReference:
    repo, _, wanted = text.partition(":")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise _reference_error(word)
    if wanted.lower().endswith(".gguf"):
        return HubReference(repo, file=wanted)
    quantisation = wanted.upper()
    return HubReference(repo, quantisation="" if quantisation == _LATEST else quantisation)


def _page(parts: Sequence[str], word: str) -> HubReference:
    repo = _repository("/".join(parts[:2]), word)
    if len(parts) <= 2:
        return repo
    if len(parts) < 5 or parts[2] not in _PAGES or not _REVISION.fullmatch(parts[3]):
        raise _reference_error(word)
    return HubReference(repo.repo, revision=parts[3], file="/".join(parts[4:]))


def _url_reference(word: str) -> UrlReference:
    parts = urlsplit(word)
    name = unquote(parts.path).rpartition("/")[2]
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
    if not is_safe:
        raise NoSuchModel(
            f"{without_secrets(word)} is not an https URL",
            hint="anyone on the way could change the file; use https",
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,199}\.gguf", name, re.ASCII | re.IGNORECASE):
        raise NoSuchModel(
            f"{without_secrets(word)} does not end with the name of a GGUF file",
            hint="give the URL of a .gguf file, or a repository as OWNER/NAME",
        )
    return UrlReference(word, name)


def without_secrets(word: str) -> str:
    """Remove user, password, query and fragment from a URL, and `user:password@` from a word."""
    if "://" not in word:
        return _USER.sub("", word)
    scheme, netloc, path, _, _ = urlsplit(word)
    return urlunsplit((scheme, netloc.rpartition("@")[2], path, "", ""))


def _reference_error(word: str) -> NoSuchModel:
    return NoSuchModel(
        f"{without_secrets(word)!r} names no repository",
        hint="write OWNER/NAME, OWNER/NAME:QUANT such as :Q4_K_M, or the URL of a .gguf file",
    )


def matching(names: Collection[str], wanted: str) -> tuple[str, ...]:
    """Return the quantisations that a word means: itself, or else with unsloth's prefix `UD-`."""
    exact = tuple(name for name in names if name == wanted)
    return exact or tuple(name for name in names if name == f"UD-{wanted}")
