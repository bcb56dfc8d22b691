"""The lines of a capture: JSON objects without keys, as docs/capture.md describes them.

Keys are taken out of requests: only headers and query parameters that are known to hold no key are
kept, and in bodies the texts of members with names of keys are replaced. Prompts are unchanged,
because a capture is of prompts. `encode` takes time in proportion to the body, so call it in a
thread.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.request.request import ProxyRequest
from proxy.upstream.timings import Timings
from supervisor import __version__
from supervisor.errors import ModelInvalid
from supervisor.fleet.planner import LaunchPlanner
from supervisor.plan.plan import Plan
from supervisor.system.files import open_regular

DURATION_MAX_S: Final = 86_400.0
SIZE_MIN_BYTES: Final = 64 * 1024
SIZE_MAX_BYTES: Final = 64 * 1024**3


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """A capture ends at the first of them; `requests` is None for any number."""

    duration_s: float
    size_bytes: int
    requests: int | None = None


REDACTED: Final = "[redacted]"
_HEADERS: Final = frozenset(
    {
        "accept",
        "anthropic-beta",
        "anthropic-version",
        "content-type",
        "openai-beta",
        "user-agent",
    }
)
_PARAMETERS: Final = frozenset({"autoload", "beta", "model"})
_SECRET_NAMES: Final = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "apikey",
        "auth_token",
        "authorization",
        "bearer_token",
        "client_secret",
        "cookie",
        "hf_token",
        "passwd",
        "password",
        "private_key",
        "proxy_authorization",
        "refresh_token",
        "secret",
        "secret_key",
        "set_cookie",
        "x_api_key",
    }
)


def keep_headers(fields: Mapping[str, str]) -> dict[str, str]:
    # Names become plain strings: orjson refuses the subclass that aiohttp uses.
    return {str(name): value for name, value in fields.items() if name.lower() in _HEADERS}


def redact_query(query: str) -> str:
    """Return a query string with the values of unknown parameters replaced."""
    pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=None)
    return urlencode([(name, value if name in _PARAMETERS else REDACTED) for name, value in pairs])


def redact_keys(value: Any) -> Any:
    """Return a JSON value with the texts of key-named members replaced."""
    if isinstance(value, dict):
        return {name: _redact_member(name, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [redact_keys(inner) for inner in value]
    return value


def is_secret_name(name: str) -> bool:
    return name.lower().replace("-", "_") in _SECRET_NAMES


def _redact_member(name: str, value: Any) -> Any:
    if isinstance(value, str) and is_secret_name(name):
        return REDACTED
    if name == "headers" and isinstance(value, dict):  # of a remote tool
        return dict.fromkeys(value, REDACTED)
    return redact_keys(value)


_ENDS_BYTES: Final = 1024**2
# The name and the path of the model have members of their own.
_OMITTED: Final = frozenset({"--model", "--alias"})


def header(planner: LaunchPlanner, model: str, limits: CaptureLimits) -> bytes:
    """Return the first line; reads files. Raises the errors of planning the model."""
    plan = planner.plan(model)
    return header_line(
        {
            "corral": __version__,
            "began_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "model": model,
            "fingerprint": model_fingerprint(plan.gguf.path),
            "build": plan.engine.build,
            "slots": plan.slots,
            "ctx_size": plan.ctx_size,
            "flags": flags_of(plan),
            "limits": {
                "duration_s": limits.duration_s,
                "size_bytes": limits.size_bytes,
                "requests": limits.requests,
            },
        }
    )


def flags_of(plan: Plan) -> dict[str, str | None]:
    """Return the options on the command line, without the address and with `~` for the home."""
    home = os.path.expanduser("~")  # noqa: PTH111 (a text, and no error without a home)
    return {
        line.flag: line.value.replace(home, "~") if line.value else None
        for line in plan.lines
        if line.flag not in _OMITTED
    }


def model_fingerprint(path: Path) -> Mapping[str, Any]:
    """Identify a model file by its size and a digest of its first and last MiB.

    A digest of gigabytes would take a minute. Raises ModelInvalid.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(str(size_bytes).encode())
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size_bytes - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    except OSError as error:
        raise ModelInvalid(f"cannot read the model {path}: {error.strerror}") from error
    return {"file": path.name, "size_bytes": size_bytes, "sha256_of_ends": digest.hexdigest()}


FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request as an instance gets it, with variants applied; `at_ms` is since the start."""

    number: int
    at_ms: float
    request: ProxyRequest

    def encode(self) -> bytes:
        request = self.request
        return line(
            "request",
            n=self.number,
            at_ms=self.at_ms,
            id=request.request_id,
            kind=request.kind.name.lower(),
            priority=request.priority,
            method=request.method,
            path=request.path,
            query=redact_query(request.query),
            headers=keep_headers(request.headers),
            body=None
            if request.form or not request.body
            else redact_keys(orjson.loads(request.body)),
            omitted=f"a form of {len(request.body)} bytes" if request.form else None,
        )


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """A response as the client got it; times are since the capture began.

    Attributes:
        status: None if none was sent.
        chunks: Parts of the body, each with the time when it was passed on.
        end_ms: When it was complete, or ended in `failure`.
        first_token_ms: Since the request arrived; None without a token.
        times_ms: Duration of each phase, as in `request.finished`.
    """

    number: int
    status: int | None
    content_type: str
    chunks: Sequence[tuple[float, bytes]]
    end_ms: float
    instance: str | None
    slot: int | None
    timings: Timings | None
    first_token_ms: float | None
    times_ms: Mapping[str, float]
    failure: str | None

    def encode(self) -> bytes:
        return line(
            "response",
            n=self.number,
            status=self.status,
            content_type=self.content_type,
            end_ms=self.end_ms,
            instance=self.instance,
            slot=self.slot,
            first_token_ms=self.first_token_ms,
            times_ms=self.times_ms,
            timings=asdict(self.timings) if self.timings else None,
            failure=self.failure,
            chunks=list(_texts(self.chunks)),
        )


Line = RequestLine | ResponseLine


def header_line(members: Mapping[str, Any]) -> bytes:
    return line("capture", format=FORMAT, **members)


def line(name: str, /, **members: Any) -> bytes:
    return orjson.dumps({"type": name, **members}, option=orjson.OPT_APPEND_NEWLINE)


def _texts(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yield the chunks as texts; an incomplete character moves to the next chunk."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at_ms, chunk in chunks:
        if text := decoder.decode(chunk):
            yield at_ms, text
    if rest := decoder.decode(b"", final=True):
        yield chunks[-1][0], rest
