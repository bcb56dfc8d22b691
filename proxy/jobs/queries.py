"""The query of a request for a list. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from proxy.errors import BadRequest


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Raises BadRequest."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequest(f"limit must be 1 to {most}")
    return int(text)


def order_of(query: Mapping[str, str]) -> Literal["asc", "desc"]:
    """Raises BadRequest."""
    match query.get("order", "desc"):
        case "asc":
            return "asc"
        case "desc":
            return "desc"
    raise BadRequest("order must be asc or desc")
