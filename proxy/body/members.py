"""A JSON body as the members of an object, bounded before any of them is made."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.body.bodies import Share
from proxy.body.count import count_values
from proxy.errors import BadRequest


async def check_complexity(body: bytes, share: Share) -> None:
    """Find out whether a JSON body may be parsed.

    Args:
        body: The body.
        share: The limits, and the memory that it may take.

    Raises:
        BodyMemoryFull: All bodies together would take too much.
        BodyTooComplex: It holds too many values, or lies too deep.
    """
    most, deepest = share.settings.max_body_values, share.settings.max_body_depth
    values = await share.run(len(body), lambda: count_values(body, most, deepest))
    share.add_values(values)


def members_of(body: bytes) -> dict[str, Any]:
    """Return what a body says that was checked. Pure.

    Of a member that is given twice the last counts. Source: nlohmann's json, as an engine has it,
    does the same (builds 10434 and 11434), so what was checked here is what it reads.

    Raises:
        BadRequest: It is no JSON object.
    """
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    return members
