"""What to forget, on the control socket."""

from __future__ import annotations

from typing import Final

import orjson

from supervisor.control.slot_messages import ForgetRequest
from supervisor.errors import SettingsInvalid

_MEMBERS: Final = ("model", "conversation", "request")


def forget_request(body: bytes) -> ForgetRequest:
    """Read what to forget; raises SettingsInvalid."""
    try:
        members = orjson.loads(body)
        given = [members[name] for name in _MEMBERS]
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsInvalid(f"the body must have {', '.join(_MEMBERS)}") from error
    named = [one for one in given if one is not None]
    if len(named) > 1 or not all(isinstance(one, str) for one in named):
        raise SettingsInvalid("the body must name one of model, conversation and request, or none")
    model, conversation, request = given
    return {"model": model, "conversation": conversation, "request": request}
