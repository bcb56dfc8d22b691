"""The request that an instance gets: for a stream wherever possible, with its progress. Pure.

An engine notices late that the client of a whole response has left, or not at all while another
stream runs, and it sends nothing before it is done. So completions are requested as a stream and
assembled here (`Assembler`): the result equals the engine's own whole response. Where it would not,
the request passes as it is:

- `logprobs`, `n_probs`: a stream leaves out the tokens that add no text, the last one among them
- `verbose`, `response_fields`: a stream has other details
- `return_tokens`, but for llama-server's own completion
- `continue_final_message`: a stream leaves out the message that it continues
- several completions from llama-server's own endpoint
- all other endpoints

A whole response that turns out to have no text is requested once more, as it is (`plain`): a stream
leaves out a cut letter and the start of a mark. So is one that lacks some of the requested token
ids: of a letter of several tokens, a stream has the last. One difference remains: where a response
ends at its limit with half a letter (U+FFFD) or the start of a stop string, a whole response has it
and a stream, or an assembled response, has not.

A stream for the client is requested with progress only where the rest of it stays the same. A chat
that continues the assistant's message has that message in its first progress, and OpenAI's
responses have events of their own there: both are requested as the client wrote them.

A body that needs no change passes byte for byte; one that does keeps every member of the client.

A node gets its own name of the model (`for_node`), and a header field that marks the request as
forwarded, so that no two proxies forward it in a loop.

Source: llama-server, builds 10434 and 11434: `return_progress` on each endpoint; of a member that
is given twice the last counts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.common.headers import HOP, PRIORITY
from proxy.errors import BadRequest
from proxy.http.forms import Form
from proxy.request.keep_alive import MEMBER
from proxy.request.request import Priority, ProxyRequest
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.endpoint_kinds import EndpointKind, is_single
from proxy.upstream.upstream import Node

_COMPLETIONS: Final = frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION})
_ASSEMBLED: Final = _COMPLETIONS | {
    EndpointKind.MESSAGES,
    EndpointKind.RESPONSES,
    EndpointKind.LLAMA_COMPLETION,
}
_STREAMED: Final = _ASSEMBLED | {EndpointKind.INFILL}
# In Anthropic's API `return_progress` changes nothing.
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
    """What is sent, and what is done with the response.

    Attributes:
        is_stream: A stream is requested.
        is_assembled: It has to become one whole response.
        hides_progress: The client did not ask for the progress in it.
    """

    body: bytes
    is_stream: bool
    is_assembled: bool
    hides_progress: bool

    def with_slot(self, slot: int | None, *, is_cache_off: bool = False) -> bytes:
        """Return the body, with `id_slot` where a slot is given; nothing of the cache is used."""
        members: dict[str, Any] = {} if slot is None else {"id_slot": slot}
        if is_cache_off:
            members["cache_prompt"] = False
        return _with_members(self.body, members, is_empty=False) if members else self.body

    @property
    def is_passed_stream(self) -> bool:
        """Whether the client gets a stream."""
        return self.is_stream and not self.is_assembled


def plan_request(request: ProxyRequest) -> UpstreamRequestPlan:
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
    body = _change_members(request.body, members, changes)
    return UpstreamRequestPlan(body, is_stream, is_assembled, hides_progress)


def plain_plan(request: ProxyRequest) -> UpstreamRequestPlan:
    """Return a request as the client wrote it."""
    return UpstreamRequestPlan(request.body, False, False, False)  # noqa: FBT003 (nothing is special)


def _is_assembled(request: ProxyRequest) -> bool:
    members = request.json
    is_whole = request.kind in _ASSEMBLED and _is_off(members.get("stream"))
    is_apart = request.kind is not EndpointKind.LLAMA_COMPLETION or is_single(members)
    is_equal = is_apart and not any(members[name] for name in _unassemblable_members(request))
    return is_whole and is_equal and not request.form


def _unassemblable_members(request: ProxyRequest) -> frozenset[str]:
    """Return the members that would make an assembled response differ, whatever their values."""
    found = _UNEQUAL.intersection(request.json)
    if found and request.kind is EndpointKind.LLAMA_COMPLETION:
        has_tokens = request.json.get("return_tokens") is True
        return found - {"return_tokens"} if has_tokens else found
    return found


def _tells_progress(request: ProxyRequest) -> bool:
    """Whether progress comes, and all of it before the first token."""
    return request.kind in _WITH_PROGRESS and is_single(request.json)


def _is_same_without(request: ProxyRequest) -> bool:
    """Whether progress changes nothing else in a stream."""
    if request.kind is EndpointKind.RESPONSES:
        return False
    match request.json.get("messages"):
        case [*_, {"role": "assistant"}]:
            return False
    return True


def _is_off(member: object) -> bool:
    """Whether a member is off; anything but a boolean is the engine's to judge."""
    return member is None or member is False


def _change_members(body: bytes, members: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
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


def for_node(
    upstream_request: UpstreamRequest,
    node: Node,
    form: Form | None = None,
    priority: Priority = "interactive",
    omitted: Collection[str] = (),
    keep_alive_s: float | None = None,
) -> UpstreamRequest:
    """Rewrite a request, whose body is empty, a JSON object or `form`, for a node.

    The node's own interactive requests go before a batch request from here. Of a JSON object, the
    members `omitted` are left out; another llama-corral gets `keep_alive`, and keeps its model.

    Raises:
        BadRequest: The body is nested too deeply to be serialised again.
    """
    headers = upstream_request.headers.copy()
    headers[HOP] = "1"
    if priority == "batch":
        headers[PRIORITY] = priority
    body = (
        form.with_model(node.model).written()
        if form
        else _json(upstream_request.body, _members(node, keep_alive_s), omitted)
    )
    is_said = bool(body) and not form
    return replace(
        upstream_request,
        headers=headers,
        query=_query(upstream_request, node, is_said=is_said),
        body=body,
    )


def _members(node: Node, keep_alive_s: float | None) -> dict[str, object]:
    if keep_alive_s is None or not node.takes_keep_alive:
        return {"model": node.model}
    return {"model": node.model, MEMBER: -1 if math.isinf(keep_alive_s) else keep_alive_s}


def _json(body: bytes, changed: Mapping[str, object], omitted: Collection[str]) -> bytes:
    if not body:
        return body
    members = {**orjson.loads(body), **changed}
    try:
        return orjson.dumps({name: value for name, value in members.items() if name not in omitted})
    except TypeError as error:
        raise BadRequest(f"the body cannot be forwarded to a node: {error}") from error


def _query(upstream_request: UpstreamRequest, node: Node, *, is_said: bool) -> str:
    """Return a query string that names the model only where the body does not."""
    pairs = parse_qsl(upstream_request.query, keep_blank_values=True)
    others = [pair for pair in pairs if pair[0] != "model"]
    return urlencode(others if is_said else [*others, ("model", node.model)])
