"""The body of a request for a batch. Pure.

Source: OpenAI's API reference, create batch; the limits of metadata too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import BadRequest
from proxy.jobs.records import COMPLETION_WINDOW, NewBatch
from proxy.jobs.upload_form import checked_ttl_s

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
_METADATA_MAX: Final = 16
_METADATA_NAME_MAX: Final = 64
_METADATA_VALUE_MAX: Final = 512


def new_batch(members: Mapping[str, Any], owner: str) -> NewBatch:
    """Raises BadRequest."""
    file_id, endpoint = members.get("input_file_id"), members.get("endpoint")
    if not isinstance(file_id, str):
        raise BadRequest("the member input_file_id must be the id of a file")
    if endpoint not in ENDPOINTS:
        raise BadRequest(f"the member endpoint must be one of {', '.join(ENDPOINTS)}")
    if members.get("completion_window") != COMPLETION_WINDOW:
        raise BadRequest(f'the member completion_window must be "{COMPLETION_WINDOW}"')
    ttl_s = _ttl_s(members.get("output_expires_after"))
    return NewBatch(owner, endpoint, file_id, _metadata(members.get("metadata")), ttl_s)


def _ttl_s(policy: object) -> int | None:
    if policy is None:
        return None
    seconds = policy.get("seconds") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or policy.get("anchor") != "created_at" or not _is_int(seconds):
        raise BadRequest("output_expires_after needs the anchor created_at and seconds")
    return checked_ttl_s(int(seconds or 0))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _metadata(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _METADATA_MAX or not _are_short(given):
        raise BadRequest(
            f"metadata may have {_METADATA_MAX} members, each a string of up to "
            f"{_METADATA_VALUE_MAX} characters with a name of up to {_METADATA_NAME_MAX}"
        )
    return orjson.dumps(given).decode()


def _are_short(given: Mapping[str, object]) -> bool:
    return all(
        isinstance(value, str)
        and len(value) <= _METADATA_VALUE_MAX
        and len(name) <= _METADATA_NAME_MAX
        for name, value in given.items()
    )
