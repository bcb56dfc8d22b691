"""New ids, which cannot be guessed."""

from __future__ import annotations

import os


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()
