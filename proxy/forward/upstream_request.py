"""What an instance is sent for a request: a stream wherever that can be, with its progress. Pure.

An engine notices late that the client of a whole answer has left, or not at all while another
stream runs, and it tells nothing before it is done. So a chat or a text completion is asked as a
stream and assembled here (`assemble`), and so are Anthropic's messages, OpenAI's responses and
llama-server's own completion (`whole`): what is assembled equals what the engine would have
answered itself. Where it would not, the request passes as it is:

- `logprobs`, `n_probs`: a stream leaves out the tokens that add no text, the last one among them
- `verbose`, `response_fields`, `return_tokens`: a stream tells other details
- `continue_final_message`: a stream leaves out the message that it continues
- several answers at once on llama-server's own page
- all other pages

A whole answer that turns out to have no text at all is asked for once more, as it is (`plain`): a
stream leaves out a cut letter and the beginning of a mark, a whole answer shows them.

One difference is left: where an answer ends at its limit with half a letter (U+FFFD) or with the
beginning of a stop string, a whole answer shows it and a stream does not, nor what is assembled.

A stream that the client gets is asked with progress only where it comes out the same without it.
A chat that goes on with the assistant's own message has that message in its first progress, and
OpenAI's responses have events of their own there: both are asked as the client wrote them.

A body that needs no change passes byte for byte; one that does keeps every member the client sent.

Source: llama-server, builds 10434 and 11434: `return_progress` on each page; of a member that is
given twice the last counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.choices import is_single
from proxy.endpoints import EndpointKind
from proxy.request import ProxyRequest

_COMPLETIONS: Final = frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION})
_ASSEMBLED: Final = _COMPLETIONS | {
    EndpointKind.MESSAGES,
    EndpointKind.RESPONSES,
    EndpointKind.LLAMA_COMPLETION,
}
_STREAMED: Final = _ASSEMBLED | {EndpointKind.INFILL}
# On Anthropic's page `return_progress` changes nothing.
_WITH_PROGRESS: Final = _STREAMED - {EndpointKind.MESSAGES}
_REWRITTEN_MAX_BYTES: Final = 1024**2
_UNEQUAL: Final = frozenset(
    (
        "logprobs",
        "n_probs",
        "verbose",
        "response_fields",
        "return_tokens",
        "continue_final_message",
    )
)


@dataclass(frozen=True, slots=True)
class UpstreamRequestPlan:
    """How a request is put to an instance.

    Attributes:
        body: The bytes that are sent.
        is_stream: Whether a stream of events comes back if all goes well.
        is_assembled: Whether that stream has to become one whole answer.
        hides_progress: Whether the client did not ask for the progress that comes.
    """

    body: bytes
    is_stream: bool
    is_assembled: bool
    hides_progress: bool

    def with_slot(self, slot: int | None) -> bytes:
        """Return the bytes that are sent, with the number of a slot where there is one."""
        if slot is None:
            return self.body
        return _with_members(self.body, {"id_slot": slot}, is_empty=False)

    @property
    def is_passed_stream(self) -> bool:
        """Return whether the client gets a stream of events."""
        return self.is_stream and not self.is_assembled


def plan_request(request: ProxyRequest) -> UpstreamRequestPlan:
    """Return how a request is put to an instance."""
    members = request.json
    is_assembled = _is_assembled(request)
    is_stream = is_assembled or (request.is_stream and request.kind in _STREAMED)
    changes: dict[str, Any] = {}
    if is_assembled:
        changes["stream"] = True
    if is_assembled and request.kind in _COMPLETIONS:
        options = members.get("stream_options")
        given = options if isinstance(options, dict) else {}
        changes["stream_options"] = {**given, "include_usage": True}
    hides_progress = _is_off(members.get("return_progress")) and _tells_progress(request)
    hides_progress = hides_progress and (is_assembled or (is_stream and _is_same_without(request)))
    if hides_progress:
        changes["return_progress"] = True
    body = _changed(request.body, members, changes)
    return UpstreamRequestPlan(body, is_stream, is_assembled, hides_progress)


def plain(request: ProxyRequest) -> UpstreamRequestPlan:
    """Return a request as the client wrote it, with a whole answer passed as it comes."""
    return UpstreamRequestPlan(request.body, False, False, False)  # noqa: FBT003 (nothing is special)


def _is_assembled(request: ProxyRequest) -> bool:
    members = request.json
    is_whole = request.kind in _ASSEMBLED and _is_off(members.get("stream"))
    is_apart = request.kind is not EndpointKind.LLAMA_COMPLETION or is_single(members)
    is_equal = is_apart and not any(members[name] for name in _UNEQUAL.intersection(members))
    return is_whole and is_equal and not request.form


def _tells_progress(request: ProxyRequest) -> bool:
    """Return whether progress comes, and all of it before the first token."""
    return request.kind in _WITH_PROGRESS and is_single(request.json)


def _is_same_without(request: ProxyRequest) -> bool:
    """Return whether a stream without its progress is the one that comes where none is asked."""
    if request.kind is EndpointKind.RESPONSES:
        return False
    match request.json.get("messages"):
        case [*_, {"role": "assistant"}]:
            return False
    return True


def _is_off(member: object) -> bool:
    """Return whether a member says no; anything else that is not a boolean is the engine's."""
    return member is None or member is False


def _changed(body: bytes, members: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    if not changes:
        return body
    # Writing a large body again takes long. Of a member given twice the last counts.
    if changes.keys() & members.keys() and len(body) <= _REWRITTEN_MAX_BYTES:
        return orjson.dumps({**members, **changes})
    return _with_members(body, changes, is_empty=not members)


def _with_members(body: bytes, members: Mapping[str, Any], *, is_empty: bool) -> bytes:
    """Return an object with more members; what the client wrote, numbers too, stays as it is."""
    head = memoryview(body)[: body.rindex(b"}")]
    return b"".join((head, b"" if is_empty else b",", orjson.dumps(members)[1:]))
