"""The lines of a capture: JSON objects without keys, as docs/capture.md describes them.

`read` returns the requests that can be replayed, their bodies, and the captured answers.

Keys are taken out of requests: only headers and query parameters that are known to hold no key are
kept, and in bodies the texts of members with names of keys are replaced. Prompts are unchanged,
because a capture is of prompts. `encode` takes time in proportion to the body, so call it in a
thread.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.forward.assemblers import assembler_for
from proxy.request.request import ProxyRequest
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent, Splitter
from proxy.upstream.upstream import Timings
from supervisor import __version__
from supervisor.errors import CaptureInvalid, ModelInvalid
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
_CHATS: Final = {EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES}
_ENDS_BYTES: Final = 1024**2
# The name and the path of the model have separate members.
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


_LINE_MAX_BYTES: Final = 64 * 1024**2
_REQUESTS_MAX: Final = 10_000
_KINDS: Final = {
    name: EndpointKind[name.upper()]
    for name in ("chat", "completion", "llama_completion", "messages", "responses")
}


@dataclass(frozen=True, slots=True)
class CapturedResponse:
    """`wait_ms` is the time before a slot was free and the model loaded."""

    status: int | None
    is_stream: bool
    body: str
    end_ms: float
    first_token_ms: float | None
    wait_ms: float
    timings: Timings | None
    failure: str | None

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.failure is None


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """A request to send again."""

    number: int
    at_ms: float
    kind: EndpointKind
    path: str
    body: Mapping[str, Any]
    response: CapturedResponse | None  # None if the capture ended before it
    # Indices of the requests that ended since the previous request was sent.
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capture:
    """`requests` are in the order in which they began; `skipped` counts the others, by kind."""

    header: Mapping[str, Any]
    requests: tuple[CapturedRequest, ...]
    skipped: Mapping[str, int]


def read(path: Path) -> Capture:
    """Read a file, whose last line may be incomplete; raises CaptureInvalid."""
    lines = _lines(path)
    header = next(lines, {})
    if header.get("type") != "capture" or not isinstance(header.get("model"), str):
        raise CaptureInvalid(f"{path} is no capture", hint="corral capture --model M makes one")
    if header.get("format") != FORMAT:
        raise CaptureInvalid(f"{path} has format {header.get('format')}, and {FORMAT} is known")
    found: dict[int, Mapping[str, Any]] = {}
    responses: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if line.get("type") == "request" and len(found) < _REQUESTS_MAX:
            found[int(line.get("n", 0))] = line
        elif line.get("type") == "response" and line.get("n") in found:
            responses[line["n"]] = line
    played = {n: line for n, line in found.items() if _is_played(line)}
    skipped = Counter(str(line.get("kind")) for n, line in found.items() if n not in played)
    if not played:
        counts = ", ".join(f"{count} of kind {kind}" for kind, count in skipped.items())
        raise CaptureInvalid(f"{path} has no request that can be played: {counts or 'it has none'}")
    try:
        requests = order_requests([_request(played[n], responses.get(n)) for n in played])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CaptureInvalid(f"{path} has a line that cannot be read: {error!r}") from error
    return Capture(header, requests, skipped)


def read_chats(path: Path) -> Iterator[tuple[EndpointKind, str, dict[str, Any]]]:
    """Yield the kind, the id and the body of each chat of a capture; raises CaptureInvalid."""
    kinds = {kind.name.lower(): kind for kind in EndpointKind}
    for line in _lines(path):
        kind, body = kinds.get(str(line.get("kind"))), line.get("body")
        if line.get("type") == "request" and kind in _CHATS and isinstance(body, dict):
            yield kind, str(line.get("id")), body


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            while line := file.readline(_LINE_MAX_BYTES):
                try:
                    found = orjson.loads(line)
                except orjson.JSONDecodeError:
                    return  # the last line may be incomplete
                yield found if isinstance(found, dict) else {}
    except OSError as error:
        raise CaptureInvalid(f"cannot read {path}: {error.strerror}") from error


def _is_played(line: Mapping[str, Any]) -> bool:
    body = line.get("body")
    has_one = isinstance(body, dict) and all(body.get(key) in {None, 1} for key in ("n", "n_cmpl"))
    return has_one and line.get("kind") in _KINDS


def _request(line: Mapping[str, Any], response: Mapping[str, Any] | None) -> CapturedRequest:
    return CapturedRequest(
        line["n"],
        line["at_ms"],
        _KINDS[line["kind"]],
        line["path"],
        line["body"],
        _response(response) if response else None,
    )


def _response(line: Mapping[str, Any]) -> CapturedResponse:
    timings, times = line.get("timings"), line.get("times_ms") or {}
    return CapturedResponse(
        status=line.get("status"),
        is_stream=str(line.get("content_type")).startswith("text/event-stream"),
        body="".join(text for _, text in line["chunks"]),
        end_ms=line["end_ms"],
        first_token_ms=line.get("first_token_ms"),
        wait_ms=sum(times.get(name, 0.0) for name in ("queued_ms", "evict_ms", "load_ms")),
        timings=Timings(**timings) if timings else None,
        failure=line.get("failure"),
    )


# In the order in which a model writes them.
_TEXTS: Final = ("reasoning_content", "thinking", "summary", "content", "text", "name", "arguments")
_INSIDE: Final = ("function", "tool_calls")


def recorded_text(request: CapturedRequest) -> str | None:
    """Return the captured text, or None if it is incomplete."""
    response = request.response
    if response is None or not response.is_whole:
        return None
    try:
        if not response.is_stream:
            return text_of(request.kind, orjson.loads(response.body))
        assembler = assembler_for(request.kind, {})
        for piece in Splitter().objects(response.body.encode()):
            assembler.add(piece)
        return text_of(request.kind, assembler.assemble())
    except (InvalidEvent, ValueError, LookupError, TypeError, AttributeError):
        return None


def text_of(kind: EndpointKind, whole: Mapping[str, Any]) -> str:
    """Return all text of a complete response; raises LookupError or TypeError for other formats."""
    match kind:
        case EndpointKind.CHAT:
            root = whole["choices"][0]["message"]
        case EndpointKind.COMPLETION:
            root = {"text": whole["choices"][0]["text"]}
        case EndpointKind.RESPONSES:
            root = whole["output"]
        case _:
            root = {"content": whole["content"]}
    return "".join(_texts_in(root))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
    elif isinstance(value, dict):
        for name in (*_TEXTS, *_INSIDE):
            yield from _texts_in(value.get(name))
        if "input" in value:
            yield orjson.dumps(value["input"]).decode()


_SEED: Final = 1
# For a request without a limit whose captured answer has an unknown length.
_TOKENS: Final = 1024
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
_LIMIT_NAMES: Final = {
    EndpointKind.RESPONSES: "max_output_tokens",
    EndpointKind.LLAMA_COMPLETION: "n_predict",
}
# Precision of clocks: a request that begins this soon after an end may have begun before it.
_CLOCK_MS: Final = 2.0
_COMPLETIONS: Final = frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION})


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Return whether the same engine has only one possible answer."""
    return body.get("temperature") == 0 or body.get("top_k") == 1


def order_requests(requests: Iterable[CapturedRequest]) -> tuple[CapturedRequest, ...]:
    """Return the requests in the order in which they began, with `after`."""
    ordered = sorted(requests, key=lambda request: request.at_ms)
    ends = deque(
        sorted(
            (request.response.end_ms, place)
            for place, request in enumerate(ordered)
            if request.response is not None
        )
    )
    played = []
    for request in ordered:
        after = []
        while ends and ends[0][0] <= request.at_ms + _CLOCK_MS:
            after.append(ends.popleft()[1])
        played.append(replace(request, after=tuple(after)))
    return tuple(played)


def most_together(requests: Sequence[CapturedRequest]) -> int:
    """Return the maximum number of requests in flight."""
    ended = accumulate(len(request.after) for request in requests)
    return max(at + 1 - count for at, count in enumerate(ended))


def played_body(request: CapturedRequest, model: str, slot: int | None) -> dict[str, Any]:
    body = {
        **request.body,
        "model": model,
        "stream": True,
        "temperature": 0,
        "seed": request.body.get("seed", _SEED),
    }
    if not any(request.body.get(name) for name in _LIMITS):
        timings = request.response.timings if request.response else None
        tokens = timings.decoded_tokens if timings else 0
        body[_LIMIT_NAMES.get(request.kind, "max_tokens")] = tokens or _TOKENS
    if request.kind in _COMPLETIONS:
        options = request.body.get("stream_options")
        body["stream_options"] = {**(options or {}), "include_usage": True}
    return body if slot is None else {**body, "id_slot": slot}
