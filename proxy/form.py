"""The model that a multipart form names. Pure.

Source: RFC 7578 section 4.2. The rest of a form, sound files mostly, is nothing to us.
"""

from __future__ import annotations

import re
from typing import Final

_MODEL: Final = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]*\bname="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]+)',
    re.IGNORECASE,
)


def model_of(form: bytes) -> str | None:
    """Return the name in the field `model`, or None where there is none."""
    field = _MODEL.search(form)
    return field[1].decode("utf-8", "replace") if field else None


def with_model(form: bytes, name: str) -> bytes:
    """Return a form with another name in the field `model`; as it is where it has none."""
    field = _MODEL.search(form)
    return form[: field.start(1)] + name.encode() + form[field.end(1) :] if field else form
