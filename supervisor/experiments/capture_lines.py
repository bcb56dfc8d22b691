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
from supervisor import __version__
from supervisor.errors import ModelInvalid
from supervisor.fleet.planner import LaunchPlanner
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
_HEADERS: Final = "accept anthropic-beta anthropic-version content-type openai-beta user-agent"
_PARAMETERS: Final = frozenset({"autoload", "beta", "model"})
_SECRETS: Final = """
    access_key access_token api_key apikey auth_token authorization bearer_token client_secret
    cookie hf_token passwd password private_key proxy_authorization refresh_token secret secret_key
    set_cookie x_api_key
"""
_KEPT_HEADERS: Final = frozenset(_HEADERS.split())
_SECRET_NAMES: Final = frozenset(_SECRETS.split())


def keep_headers(fields: Mapping[str, str]) -> dict[str, str]:
    # Names become plain strings: orjson refuses the subclass that aiohttp uses.
    return {str(name): value for name, value in fields.items() if name.lower() in _KEPT_HEADERS}


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


def _redact_member(name: str, value: Any) -> Any:
    if isinstance(value, str) and name.lower().replace("-", "_") in _SECRET_NAMES:
        return REDACTED
    if name == "headers" and isinstance(value, dict):  # of a remote tool
        return dict.fromkeys(value, REDACTED)
    return redact_keys(value)


FORMAT: Final = 1
_ENDS_BYTES: Final = 1024**2
# The name and the path of the model have members of their own.
_OMITTED: Final = frozenset({"--model", "--alias"})


def header(planner: LaunchPlanner, model: str, limits: CaptureLimits) -> bytes:
    """Return the first line; reads files. Raises the errors of planning the model."""
    plan = planner.plan(model)
    home = os.path.expanduser("~")  # noqa: PTH111 (a text, and no error without a home)
    options = (option for option in plan.lines if option.flag not in _OMITTED)
    return line(
        "capture",
        format=FORMAT,
        corral=__version__,
        began_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        model=model,
        fingerprint=model_fingerprint(plan.gguf.path),
        build=plan.engine.build,
        slots=plan.slots,
        ctx_size=plan.ctx_size,
        flags={
            option.flag: option.value.replace(home, "~") if option.value else None
            for option in options
        },
        limits=asdict(limits),
    )


def model_fingerprint(path: Path) -> Mapping[str, Any]:
    """Identify a model by size, first and last MiB: all takes a minute. Raises ModelInvalid."""
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


def request_line(number: int, at_ms: float, request: ProxyRequest) -> bytes:
    """Return a request as an instance gets it, with variants applied."""
    has_body = request.body and not request.form
    return line(
        "request",
        n=number,
        at_ms=at_ms,
        id=request.request_id,
        kind=request.kind.name.lower(),
        priority=request.priority,
        method=request.method,
        path=request.path,
        query=redact_query(request.query),
        headers=keep_headers(request.headers),
        body=redact_keys(orjson.loads(request.body)) if has_body else None,
        omitted=f"a form of {len(request.body)} bytes" if request.form else None,
    )


def response_line(members: Mapping[str, Any], chunks: Sequence[tuple[float, bytes]]) -> bytes:
    """Return a response as the client got it; a chunk has the time when it was passed on."""
    return line("response", **members, chunks=list(_texts(chunks)))


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
