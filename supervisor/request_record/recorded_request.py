"""One recorded request: figures only, one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_SECONDS_MAX: Final = 100 * 365 * 86_400
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=_SECONDS_MAX)]
_SignedSeconds = Annotated[float, Field(ge=-_SECONDS_MAX, le=_SECONDS_MAX)]


class RecordedRequest(BaseModel):
    """The sizes and pauses of one request.

    Attributes:
        kind: Of the endpoint: a name of `proxy.endpoints.EndpointKind` in lower case.
        conversation: A random number for each conversation; None where it is not known.
        prompt_tokens: All of the prompt, with those from the cache.
        cached_tokens: Of the prompt, those taken from the cache.
        generated_tokens: Of the answer.
        after_any_s: From the beginning of the request on the line before to that of this one; below
            0 where this one began earlier and ended later. None for the first of a daemon.
        after_own_s: From the end of the previous request of the conversation to the beginning of
            this one; None for its first.
        duration_s: From its arrival to the end of its answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    conversation: _Count | None
    prompt_tokens: _Count
    cached_tokens: _Count
    generated_tokens: _Count
    after_any_s: _SignedSeconds | None
    after_own_s: _Seconds | None
    duration_s: _Seconds

    @property
    def line(self) -> bytes:
        return orjson.dumps(self.model_dump(), option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """Return the request of a line; None for one that is cut off or invalid."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            return None
