"""The file with the API key of a node: one line, for us alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from proxy.auth.secret_file import read_private
from proxy.errors import ConfigError

_MAX_BYTES: Final = 4096
_KEY: Final = re.compile(rb"[!-~]+")
_WRONG: Final = "it must hold the key that the node asks for, in one line, and nothing else"


def read_key(path: Path) -> str:
    """Return the key in a file.

    Raises:
        ConfigError: It is not there, others may read it, or it holds no key; none is repeated.
    """
    missing = "write the node's key into it, or unset key_file of the node"
    text, _ = read_private(path, "the key file", _MAX_BYTES, missing=missing, wrong=_WRONG)
    key = text.strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"the key file {path} does not hold one key", _WRONG)
    return key.decode()
