"""Reads a capture: which requests can be played again, what to send, and the captured answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import orjson

from proxy.forward.assemblers import assembler_for
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent, Splitter
from proxy.upstream.upstream import Timings
from supervisor.errors import CaptureInvalid
from supervisor.experiments.capture_lines import FORMAT
from supervisor.system.files import open_regular

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
    return "".join(_texts(root))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for name in (*_TEXTS, *_INSIDE):
            yield from _texts(value.get(name))
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
