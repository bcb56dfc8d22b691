"""Every error a client can meet, and the status it is answered with.

    ProxyError                       500
    ├── BadRequest                   400  the body or the query cannot be understood
    │   ├── LimitExceeded            400  the request asks too much of an engine
    │   └── BodyTooComplex           400  the body holds too many values, or lies too deep
    ├── Unauthorized                 401  no API key, or one that is not known
    ├── Forbidden                    403  the Host, the Origin or the key may not ask this
    ├── NotFound                     404  no such path
    ├── UnknownModel                 404  no such model; the known ones are named
    ├── MethodNotAllowed             405  the path is there, the method is not
    ├── RequestTimeout               408  the client did not send its request in time
    ├── BodyTooLarge                 413  more bytes than the limit
    ├── BodyExpands                  413  decompressed, the body becomes too many times larger
    ├── UnknownCoding                415  the body is compressed in a way that is not known here
    ├── ExpectationFailed            417  the client expects what nobody here can do
    ├── TooManyRequests              429  not now; Retry-After says when
    │   ├── QueueFull                429  too many wait for the model
    │   └── RateLimited              429  the key has used up what it may
    ├── CrashesEngine                422  engines crashed twice while they computed this request
    ├── HeaderTooLarge               431  the header has too many fields, or too long ones
    ├── InternalError                500  a fault of the proxy itself
    ├── UpstreamFailed               502  an instance broke while it answered
    │   ├── UpstreamCrashed          502  a signal ended it while it computed the request
    │   ├── UpstreamConnectFailed    502  it did not begin to answer: one more try is safe
    │   │   ├── UpstreamSilent       502  it is not there to be asked: others are asked instead
    │   │   ├── UpstreamUnconnected  502  it takes no connection: nothing was sent
    │   │   ├── UpstreamLoading      503  its model is not loaded yet
    │   │   └── UpstreamUnavailable  503  another machine cannot take the request now
    │   └── UpstreamShutDown         502  it was stopped: one more try is safe before a first byte
    ├── Unavailable                  503  no instance can take the request now
    │   ├── ModelLoading             503  one is on its way
    │   ├── NotLoaded                503  the model is not loaded, and looking does not load it
    │   ├── QueueTimeout             503  the request's patience ended before its turn came
    │   ├── BodyMemoryFull           503  the bodies of all requests take too much memory
    │   └── Draining                 503  the proxy is about to end
    └── UpstreamTimeout              504  an instance said nothing for too long

    ListenFailed                            the address cannot be listened on (no client sees it)
    ConfigError                           a setting or the keys file is wrong (no client sees it)

Clients of `/v1/messages` get Anthropic's shape, all others OpenAI's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

_QUOTED_MAX_CHARACTERS: Final = 80


class ProxyError(Exception):
    """A request was not served, and this says why and what to do next.

    Attributes:
        status: HTTP status of the answer.
        code: Stable name in snake case, for programs.
        openai_type: The `type` that OpenAI's clients know for this kind of error.
        anthropic_type: The `type` that Anthropic's clients know for this kind of error.
        ends_connection: Whether the connection is of no more use after the answer.
        message: What happened, to what, and what to do next.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "failed"
    openai_type: ClassVar[str] = "server_error"
    anthropic_type: ClassVar[str] = "api_error"
    ends_connection: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def headers(self) -> Mapping[str, str]:
        """Return the headers that this error adds to its answer."""
        return {}


class BadRequest(ProxyError):
    """The body or the query cannot be understood."""

    status = 400
    code = "invalid_request"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class LimitExceeded(BadRequest):
    """A member of the body holds more than a limit of `[proxy.limits]`.

    Args:
        member: The member.
        what: What is counted, as a phrase behind a number; empty where the number is its value.
        amount: How much there is.
        limit: How much there may be.
        setting: The limit's name under `[proxy.limits]`.
    """

    code = "limit_exceeded"

    def __init__(self, member: str, what: str, amount: float, limit: int, setting: str) -> None:
        # A number may have a thousand digits.
        shown = f"{amount:d}" if isinstance(amount, int) and amount < 10**18 else f"{amount:.3g}"
        counted = f"has {shown} {what}" if what else f"is {shown}"
        super().__init__(
            f"{member} {counted}, more than {limit}; "
            f"send less, or raise {setting} under [proxy.limits]"
        )


class BodyTooComplex(BadRequest):
    """The body holds more values than the limit, or its lists and objects lie too deep.

    Args:
        what: Which limit was met.
        setting: What the setting is called behind `max_body_`.
    """

    code = "body_too_complex"

    def __init__(self, what: str, setting: str) -> None:
        super().__init__(f"the body is too complex: {what}; raise max_body_{setting} under [proxy]")


class Unauthorized(ProxyError):
    """No API key came with the request, or one that is not known."""

    status = 401
    code = "invalid_api_key"
    openai_type = "invalid_request_error"
    anthropic_type = "authentication_error"

    def headers(self) -> Mapping[str, str]:
        """Return what RFC 9110 section 15.5.2 asks for: how to prove who one is."""
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ProxyError):
    """The Host, the Origin or the API key is not one that may ask this."""

    status = 403
    code = "forbidden"
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"


class NotFound(ProxyError):
    """Nothing is served at this path."""

    status = 404
    code = "not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"


class UnknownModel(ProxyError):
    """No model of that name is configured."""

    status = 404
    code = "model_not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"

    def __init__(self, name: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(name[:_QUOTED_MAX_CHARACTERS], known, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        super().__init__(f"there is no model {quoted(name)}{guess} ({known_models(known)})")


class MethodNotAllowed(ProxyError):
    """The path is served, but not for this method."""

    status = 405
    code = "method_not_allowed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        self._allowed = ", ".join(sorted(allowed))
        super().__init__(f"{path} does not take {method}, only {self._allowed}")

    def headers(self) -> Mapping[str, str]:
        """Return what RFC 9110 section 15.5.6 asks for: the methods that are taken."""
        return {"Allow": self._allowed}


class RequestTimeout(ProxyError):
    """The client did not send its request in time."""

    status = 408
    code = "request_timeout"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    ends_connection = True


class BodyTooLarge(ProxyError):
    """The body has more bytes than the limit."""

    status = 413
    code = "body_too_large"
    openai_type = "invalid_request_error"
    anthropic_type = "request_too_large"
    ends_connection = True  # the rest of the body is not wanted

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the body is larger than {limit_bytes} bytes; "
            "send less, or raise max_body_bytes under [proxy]"
        )


class BodyExpands(ProxyError):
    """Decompressed, the body becomes too many times larger."""

    status = 413
    code = "body_expands"
    openai_type = "invalid_request_error"
    anthropic_type = "request_too_large"
    ends_connection = True

    def __init__(self, max_ratio: float) -> None:
        super().__init__(
            f"the body becomes more than {max_ratio:g} times larger when decompressed; "
            "send it as it is, or raise max_body_ratio under [proxy]"
        )


class UnknownCoding(ProxyError):
    """The body is compressed in a way that is not known here."""

    status = 415
    code = "unknown_content_encoding"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    ends_connection = True

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"the Content-Encoding {quoted(coding)} is not known here; send gzip, deflate or none"
        )

    def headers(self) -> Mapping[str, str]:
        """Return what RFC 9110 section 15.5.16 asks for: the codings that are taken."""
        return {"Accept-Encoding": "gzip, deflate"}


class ExpectationFailed(ProxyError):
    """The client expects what nobody here can do."""

    status = 417
    code = "expectation_failed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    ends_connection = True

    def __init__(self) -> None:
        super().__init__("the one expectation met here is 100-continue")


class HeaderTooLarge(ProxyError):
    """The header has too many fields, or one that is too long."""

    status = 431
    code = "header_too_large"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"
    ends_connection = True


class CrashesEngine(ProxyError):
    """Engines crashed twice while they computed this request; clients' libraries do not repeat it.

    Args:
        model: The model's id.
        crashes: How many engines crashed.
        rest_s: Whole seconds for which it is still refused.
    """

    status = 422
    code = "crashes_engine"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"

    def __init__(self, model: str, crashes: int, rest_s: int) -> None:
        super().__init__(
            f"{crashes} engines of {model} crashed while they computed this request; "
            f"it is refused for {rest_s} s more: change it, or ask again later"
        )


class TooManyRequests(ProxyError):
    """Not now, but later.

    Attributes:
        retry_after_s: Whole seconds after which it is worth to ask again, at least 1.
    """

    status = 429
    code = "rate_limit_exceeded"
    openai_type = "rate_limit_error"
    anthropic_type = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> Mapping[str, str]:
        """Return when to ask again."""
        return {"Retry-After": str(self.retry_after_s)}


class QueueFull(TooManyRequests):
    """Too many requests wait for the model already."""

    code = "queue_full"


class RateLimited(TooManyRequests):
    """The API key has used up what it may."""


class InternalError(ProxyError):
    """A fault of the proxy itself."""

    code = "internal_error"

    def __init__(
        self, message: str = "the proxy met a fault of its own; its log has the details"
    ) -> None:
        super().__init__(message)


class UpstreamFailed(ProxyError):
    """An instance broke while it answered."""

    status = 502
    code = "upstream_failed"


class UpstreamCrashed(UpstreamFailed):
    """An instance was ended by a signal while it computed the request: it is not repeated."""

    code = "upstream_crashed"

    def __init__(self, instance: str) -> None:
        super().__init__(
            f"{instance} crashed while it computed this request, which is not tried again; "
            "its log tells more (`corral logs`)"
        )

    def headers(self) -> Mapping[str, str]:
        """Return what keeps clients' libraries from trying again by themselves.

        Source: `_should_retry` of openai-python and anthropic-python.
        """
        return {"X-Should-Retry": "false"}


class UpstreamConnectFailed(UpstreamFailed):
    """An instance did not begin to answer: asking once more repeats nothing that was seen.

    Attributes:
        instance: The instance's name.
    """

    def __init__(self, instance: str, what: str) -> None:
        super().__init__(f"{instance} {what}")
        self.instance = instance


class UpstreamSilent(UpstreamConnectFailed):
    """An instance sent no first byte, and did not answer `/health` beside it."""

    def __init__(self, instance: str) -> None:
        super().__init__(instance, "sent no first byte and does not answer /health")


class UpstreamUnconnected(UpstreamConnectFailed):
    """An instance takes no connection: nothing of the request was sent."""


class UpstreamLoading(UpstreamConnectFailed):
    """An instance that was thought to be ready has not loaded its model yet."""

    status = 503
    code = "loading"
    anthropic_type = "overloaded_error"

    def __init__(self, instance: str) -> None:
        super().__init__(instance, "is still loading its model; ask again")

    def headers(self) -> Mapping[str, str]:
        """Return when to ask again."""
        return {"Retry-After": "1"}


class UpstreamUnavailable(UpstreamConnectFailed):
    """Another machine cannot take the request now: its model left, or it is about to stop."""

    status = 503
    code = "unavailable"
    anthropic_type = "overloaded_error"

    def __init__(self, instance: str) -> None:
        super().__init__(instance, "cannot take the request now; ask again")

    def headers(self) -> Mapping[str, str]:
        """Return when to ask again."""
        return {"Retry-After": "1"}


class UpstreamShutDown(UpstreamFailed):
    """An instance was stopped, by us, before its answer was complete.

    Attributes:
        instance: The instance's name.
    """

    def __init__(self, instance: str) -> None:
        super().__init__(f"{instance} was stopped before the answer was complete")
        self.instance = instance


class Unavailable(ProxyError):
    """No instance can take the request now.

    Attributes:
        retry_after_s: Whole seconds after which it is worth to ask again, at least 1.
    """

    status = 503
    code = "unavailable"
    anthropic_type = "overloaded_error"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> Mapping[str, str]:
        """Return when to ask again."""
        return {"Retry-After": str(self.retry_after_s)}


class ModelLoading(Unavailable):
    """An instance is being loaded."""

    code = "loading"


class NotLoaded(Unavailable):
    """The model is not loaded, and the request is not one that loads it."""

    code = "not_loaded"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} is not loaded, and a GET does not load it; a request for an answer does, "
            f"as does corral load {model}"
        )

    def headers(self) -> Mapping[str, str]:
        """Return nothing: to ask again changes nothing."""
        return {}


class QueueTimeout(Unavailable):
    """The request's patience ended before its turn came."""

    code = "queue_timeout"


class BodyMemoryFull(Unavailable):
    """The bodies of all requests, or of one client's, take as much memory as they may."""

    code = "body_memory_full"
    ends_connection = True  # the rest of the body is not wanted

    def __init__(self, limit_bytes: int, whose: str) -> None:
        super().__init__(
            f"the bodies of {whose} take {limit_bytes} bytes of memory, as much as they may; "
            "retry later, or raise body_memory_bytes under [proxy]"
        )


class Draining(Unavailable):
    """The proxy finishes what it holds, takes no more, and ends."""

    code = "draining"
    ends_connection = True

    def __init__(self, message: str = "the server is stopping; ask again") -> None:
        super().__init__(message)


class UpstreamTimeout(ProxyError):
    """An instance said nothing for too long."""

    status = 504
    code = "upstream_timeout"


class ListenFailed(Exception):
    """The address cannot be listened on.

    Attributes:
        host: The address that was asked for.
        port: The TCP port that was asked for.
        message: What happened, to what.
        hint: What to do next.
    """

    def __init__(self, host: str, port: int, reason: str, hint: str) -> None:
        self.host = host
        self.port = port
        self.message = f"cannot listen on {host}:{port}: {reason}"
        self.hint = hint
        super().__init__(self.message)


class ConfigError(Exception):
    """A setting, or the file of API keys, is not one that the proxy can work with.

    Attributes:
        message: What is wrong, where.
        hint: What to do next.
    """

    def __init__(self, message: str, hint: str) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)


def known_models(names: Sequence[str]) -> str:
    """Return the part of a sentence that names the models, or says that there is none."""
    return f"the models are: {', '.join(names)}" if names else "no model is configured"


def quoted(text: str) -> str:
    """Return a client's own words fit to be repeated: short, printable, in quotes."""
    shown = text[:_QUOTED_MAX_CHARACTERS]
    return ascii(shown) + ("…" if shown != text else "")
