"""The difference between two states as a JSON Merge Patch. Pure.

States have no null: in a patch it removes a member. Source: RFC 7396.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def merge_patch(before: Json, after: Json) -> dict[str, Any]:
    """What makes `after` of `before`; empty where they are equal."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if difference := merge_patch(old, value):
                patch[name] = difference
        elif old != value:
            patch[name] = value
    return patch
