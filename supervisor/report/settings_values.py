"""The settings without secrets, and without the texts of prompts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from supervisor.report.anonymous import HIDDEN

_SECRET: Final = re.compile(r"(?:^|[._-])(?:api[_-]?key|key|token|password|secret|header)s?$")
_TEXTS: Final = re.compile(r"\.variants\.|(?:^|\.)hooks\.|chat[-_]template|system[-_]prompt")


def without_secrets(
    values: Mapping[str, Any], origins: Mapping[str, str], *, with_prompts: bool
) -> list[str]:
    """Return `key = value` lines of those settings that are not the defaults.

    Args:
        values: By dotted key.
        origins: Where each comes from, of those that are set.
        with_prompts: Whether texts that requests are made of are kept.
    """
    return [
        f"{key} = {_shown(key, value, with_prompts=with_prompts)!r}  # {origins[key]}"
        for key, value in values.items()
        if key in origins
    ]


def _shown(key: str, value: Any, *, with_prompts: bool) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if _SECRET.search(key):
        return HIDDEN
    if _TEXTS.search(key) and not with_prompts:
        return HIDDEN
    return value
