"""Every error that a client can get, by HTTP status.

    ProxyError                       500
    ├── BadRequest                   400  the body or the query is invalid
    │   ├── LimitExceeded            400  a member exceeds a limit of `[proxy.limits]`
    │   ├── PreviousResponseNotFound 400  no stored response of the client has the id
    │   └── BodyTooComplex           400  the body has too many values or levels
    ├── Unauthorized                 401  no API key, or an unknown one
    │   ├── SessionRequired          401  the dashboard needs a session, or an admin's key
    │   └── InvalidToken             401  a one-time token was used, is too old or unknown
    ├── Forbidden                    403  the Host, the Origin or the key does not allow it
    ├── NotFound                     404  no such path
    ├── UnknownModel                 404  no such model; the message lists the known ones
    ├── MethodNotAllowed             405  the path exists, but not for this method
    ├── RequestTimeout               408  the client did not send its request in time
    ├── Conflict                     409  a file or a batch is in a state that does not allow it
    ├── BodyTooLarge                 413  more bytes than the limit
    ├── BodyExpands                  413  the decompressed body is too many times larger
    ├── UnknownCoding                415  unsupported Content-Encoding
    ├── UnsupportedMediaType         415  a request of the dashboard without JSON
    ├── ExpectationFailed            417  an Expect other than 100-continue
    ├── CrashesEngine                422  engines crashed twice while computing this request
    ├── TooManyRequests              429  the key is over its rate limit
    │   └── QueueFull                429  too many requests wait for the model
    ├── HeaderTooLarge               431  the header has too many fields, or too long ones
    ├── RequestCancelled             499  an operator cancelled it; client libraries do not retry
    ├── InternalError                500  a fault of the proxy
    ├── NotServed                    501  an endpoint of Ollama's API that is not served here
    ├── UpstreamFailed               502  an instance failed while it answered
    │   ├── UpstreamKilled           502  SIGKILL from outside ended it; one retry, or continued
    │   ├── ToolCallBroken           502  a call of a tool is broken, also when generated again
    │   ├── UpstreamCrashed          502  a signal ended it while it computed the request
    │   │   └── TrialCrashed         502  it was on trial; one retry before the first byte
    │   ├── UpstreamShutDown         502  we stopped it; one retry is safe before the first byte
    │   └── UpstreamConnectFailed    502  it sent no byte of a response; one retry is safe
    │       ├── TrialFailed          502  it is on trial and answered with an error
    │       ├── UpstreamSilent       502  it does not answer /health either; others are tried
    │       ├── UpstreamUnconnected  502  it accepts no connection; nothing was sent
    │       │   └── NodeUnconnected  502  a node accepts no connection
    │       ├── UpstreamLoading      503  its model is not loaded yet
    │       └── UpstreamUnavailable  503  a node unloaded the model
    │           └── UpstreamDraining 503  a node is stopping
    ├── Unavailable                  503  no instance can take the request now
    │   ├── ModelLoading             503  an instance is loading
    │   ├── ModelFailed              503  the model failed, was stopped, or has no room in memory
    │   ├── NoModelServes            503  none is configured, or all failed (`/health`)
    │   ├── NotLoaded                503  the model is not loaded, and this request does not load it
    │   ├── QueueTimeout             503  the request waited too long for a slot
    │   ├── WaitTooLong              503  the first token is expected later than the client waits
    │   ├── BodyMemoryFull           503  the bodies of all requests use too much memory
    │   ├── StorageFailed            503  the database of jobs cannot be used
    │   └── Draining                 503  the proxy is stopping
    ├── UpstreamTimeout              504  an instance sent nothing for too long
    └── StorageFull                  507  no space is left for files and results of jobs

    ConfigError, ListenFailed        the proxy cannot start; no client sees them

`/v1/messages` uses Anthropic's error format, `/api/` Ollama's, all others OpenAI's. The `type` of
Anthropic's and OpenAI's follows from the status.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import ClassVar, Final

_QUOTED_MAX_CHARACTERS: Final = 80
_ANTHROPIC_TYPES: Final = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)


def openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def anthropic_type(status: int) -> str:
    default = "invalid_request_error" if status < 500 else "api_error"
    return _ANTHROPIC_TYPES.get(status, default)


class Retry(Enum):
    """How the proxy continues with a request whose instance failed (`proxy.forward.forward`)."""

    NEVER = auto()
    ONCE = auto()  # before the first byte
    CONTINUE = auto()  # as ONCE; after the first byte, another instance continues a plain chat
    MOVE = auto()  # to others as long as instances fail like this, up to a limit; then as ONCE
    ELSEWHERE = auto()  # to others, each once, up to a limit


class ProxyError(Exception):
    """A request failed; the message says what happened, to what, and how to fix it."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "failed"  # stable name in snake case for programs
    text: ClassVar[str] = ""  # the message of an error that always has the same
    # the request's member that it is about, if programs look for that
    param: ClassVar[str | None] = None
    retry: ClassVar[Retry] = Retry.NEVER
    # whether another model may answer: this one failed, was stopped, does not fit or has no node,
    # no slot became free in time, or no first byte arrived
    falls_back: ClassVar[bool] = False
    # whole seconds after which a retry can succeed, at least 1; None if unknown
    retry_after_s: int | None = None
    extra_headers: Mapping[str, str] = MappingProxyType({})
    ends_connection: ClassVar[bool] = False

    def __init__(self, message: str = "", retry_after_s: int | None = None) -> None:
        self.message = message or self.text
        super().__init__(self.message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def headers(self) -> Mapping[str, str]:
        if self.retry_after_s is None:
            return self.extra_headers
        return {**self.extra_headers, "Retry-After": str(self.retry_after_s)}


class BadRequest(ProxyError):
    status = 400
    code = "invalid_request"


class LimitExceeded(BadRequest):
    code = "limit_exceeded"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class PreviousResponseNotFound(BadRequest):
    code = "previous_response_not_found"
    param = "previous_response_id"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id {quote(response_id)} not found.")


class BodyTooComplex(BadRequest):
    code = "body_too_complex"

    def __init__(self, reason: str, setting: str) -> None:
        super().__init__(f"the body is too complex: {reason}; raise {setting} under [proxy]")


class Unauthorized(ProxyError):
    status = 401
    code = "invalid_api_key"
    extra_headers = MappingProxyType({"WWW-Authenticate": "Bearer"})  # RFC 9110 section 15.5.2


class SessionRequired(Unauthorized):
    code = "session_required"
    text = (
        "this needs a session of the dashboard: `corral ui` on the daemon's machine opens one, "
        "and so does an admin's API key"
    )


class SessionTokenRequired(SessionRequired):
    text = (
        "the cookie of a session counts only with the header X-Corral-Session, which the "
        "dashboard's page sends; `corral ui` on the daemon's machine signs this page in"
    )


class InvalidToken(Unauthorized):
    code = "invalid_token"
    text = (
        "the link was used already, is older than a minute, or is of another daemon; "
        "`corral ui` makes a new one"
    )


class Forbidden(ProxyError):
    status = 403
    code = "forbidden"


class NotFound(ProxyError):
    status = 404
    code = "not_found"


class UnknownModel(ProxyError):
    status = 404
    code = "model_not_found"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name[:_QUOTED_MAX_CHARACTERS], known, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        super().__init__(f"there is no model {quote(name)}{guess} ({known_models(known)})")


class MethodNotAllowed(ProxyError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        methods = ", ".join(sorted(allowed))
        self.extra_headers = {"Allow": methods}  # RFC 9110 section 15.5.6
        super().__init__(f"{path} does not allow {method}, only {methods}")


class RequestTimeout(ProxyError):
    status = 408
    code = "request_timeout"
    ends_connection = True


class Conflict(ProxyError):
    status = 409
    code = "conflict"
    # See UpstreamCrashed; otherwise openai-python retries 409.
    extra_headers = MappingProxyType({"X-Should-Retry": "false"})


class BodyTooLarge(ProxyError):
    status = 413
    code = "body_too_large"
    ends_connection = True  # the rest of the body is not read

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the body is larger than {limit_bytes} bytes; "
            "send less, or raise max_body_bytes under [proxy]"
        )


class BodyExpands(ProxyError):
    status = 413
    code = "body_expands"
    ends_connection = True


class UnknownCoding(ProxyError):
    status = 415
    code = "unknown_content_encoding"
    extra_headers = MappingProxyType({"Accept-Encoding": "gzip, deflate"})  # RFC 9110, 15.5.16
    ends_connection = True


class UnsupportedMediaType(ProxyError):
    status = 415
    code = "unsupported_media_type"


class ExpectationFailed(ProxyError):
    status = 417
    code = "expectation_failed"
    text = "the only supported expectation is 100-continue; send no other Expect"
    ends_connection = True


class CrashesEngine(ProxyError):
    # 422: client libraries do not retry it.
    status = 422
    code = "crashes_engine"


class TooManyRequests(ProxyError):
    status = 429
    code = "rate_limit_exceeded"
    retry_after_s = 1


class KeyLimited(TooManyRequests):
    """An API key has reached a limit."""


class QueueFull(TooManyRequests):
    code = "queue_full"
    falls_back = True


class HeaderTooLarge(ProxyError):
    status = 431
    code = "header_too_large"
    ends_connection = True


class RequestCancelled(ProxyError):
    status = 499
    code = "request_cancelled"


class InternalError(ProxyError):
    code = "internal_error"
    text = "internal error of the proxy; its log has the details"


class NotServed(ProxyError):
    status = 501
    code = "not_served"
    extra_headers = MappingProxyType({"X-Should-Retry": "false"})  # as UpstreamCrashed


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The text that a client has of a chat whose stream broke off."""

    text: str
    tokens: int  # number of events with text, one token each
    id: object  # the completion's id, as the client knows it
    prompt_tokens: int = 0  # tokens of the prompt before it; 0 if unknown


# Of an answer that has not begun.
NO_ANSWER: Final = Unfinished("", 0, None)


class UpstreamFailed(ProxyError):
    """An instance failed; `unfinished` is the client's answer so far, if plain text."""

    status = 502
    code = "upstream_failed"
    unfinished: Unfinished | None = None

    def __init__(self, message: str, instance: str = "") -> None:
        super().__init__(message)
        self.instance = instance


class ToolCallBroken(UpstreamFailed):
    """The model's call of a tool stayed broken, also when it was generated again."""

    code = "tool_call_broken"
    extra_headers = MappingProxyType({"X-Should-Retry": "false"})  # as UpstreamCrashed

    def __init__(self, tool: str, fault: str, retries: int) -> None:
        named = f"the model's call of {quote(tool)}" if tool else "the model's tool call"
        again = f" and {retries} more of it" if retries else ""
        super().__init__(
            f"{named} is broken{again}: {fault}; send the request again, give it more tokens or a "
            "simpler schema, or take another model"
        )


class UpstreamCrashed(UpstreamFailed):
    # The request may have caused the crash: no other model answers it, and client libraries do not
    # retry it. Source: `_should_retry` of openai-python and anthropic-python.
    code = "upstream_crashed"
    extra_headers = MappingProxyType({"X-Should-Retry": "false"})


class TrialCrashed(UpstreamCrashed):
    retry = Retry.CONTINUE

    def __init__(self, instance: str) -> None:
        super().__init__(
            f"{instance}, which is on trial, crashed while computing this request; see its log "
            "(`corral logs`)",
            instance,
        )


class UpstreamKilled(UpstreamFailed):
    code = "upstream_killed"
    retry = Retry.CONTINUE

    def __init__(self, instance: str) -> None:
        super().__init__(
            f"{instance} was killed from outside (SIGKILL) while it computed this request; retry",
            instance,
        )


class UpstreamShutDown(UpstreamFailed):
    retry = Retry.ONCE
    falls_back = True

    def __init__(self, instance: str) -> None:
        super().__init__(f"{instance} was stopped before the response was complete", instance)


class UpstreamConnectFailed(UpstreamFailed):
    retry = Retry.ONCE
    falls_back = True

    def __init__(self, instance: str, reason: str) -> None:
        super().__init__(f"{instance} {reason}", instance)


class UpstreamSilent(UpstreamConnectFailed):
    retry = Retry.MOVE


class UpstreamUnconnected(UpstreamConnectFailed):
    pass


class TrialFailed(UpstreamConnectFailed):
    pass


class NodeUnconnected(UpstreamUnconnected):
    retry = Retry.ELSEWHERE


class UpstreamLoading(UpstreamConnectFailed):
    status = 503
    code = "model_loading"
    retry_after_s = 1


class UpstreamUnavailable(UpstreamConnectFailed):
    status = 503
    code = "unavailable"
    retry_after_s = 1
    retry = Retry.ELSEWHERE


class UpstreamDraining(UpstreamUnavailable):
    code = "draining"


class Unavailable(ProxyError):
    status = 503
    code = "unavailable"
    falls_back = True
    retry_after_s: int | None = 1


class ModelLoading(Unavailable):
    code = "model_loading"


class ModelFailed(Unavailable):
    code = "model_failed"
    retry_after_s = None  # it starts again by a command; the raiser knows where a request is enough


class NoModelServes(Unavailable):
    retry_after_s = None  # as ModelFailed


class NotLoaded(Unavailable):
    code = "not_loaded"
    retry_after_s = None  # a retry changes nothing
    falls_back = False  # the client wants to know


class QueueTimeout(Unavailable):
    code = "queue_timeout"


class WaitTooLong(Unavailable):
    code = "wait_too_long"


class BodyMemoryFull(Unavailable):
    code = "body_memory_full"
    falls_back = False
    ends_connection = True  # the rest of the body is not read


class StorageFailed(Unavailable):
    code = "storage_failed"
    falls_back = False
    retry_after_s = 10


class Draining(Unavailable):
    code = "draining"
    falls_back = False
    ends_connection = True


class UpstreamTimeout(ProxyError):
    status = 504
    code = "upstream_timeout"
    falls_back = True


class StorageFull(ProxyError):
    status = 507  # RFC 4918 section 11.5
    code = "storage_full"
    extra_headers = MappingProxyType({"X-Should-Retry": "false"})  # as UpstreamCrashed


class ConfigError(Exception):
    """A setting or a file with keys is unusable."""

    def __init__(self, message: str, hint: str) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)


class ListenFailed(ConfigError):
    """The proxy cannot listen on the address in its settings."""


def known_models(names: Sequence[str]) -> str:
    return f"available models: {', '.join(names)}" if names else "no model is configured"


def quote(text: str) -> str:
    """Return a client's text for a message: shortened, escaped and in quotes."""
    shown = text[:_QUOTED_MAX_CHARACTERS]
    return ascii(shown) + ("…" if shown != text else "")
