"""Answers that need a second request: tools with a format, and a chat whose stream broke off.

Tools with a format: llama-server supports only one of them in a request. With a format, no call is
possible, regardless of `tool_choice`. So the format is left out if a call is required. If the model
may choose, the first request has no format, and its response is held back. If it begins a call, it
is the answer. If not, a second request has the format and `tool_choice: none`; its prompt is in the
cache. The first response is abandoned as soon as its text begins as JSON, so a model that answers
in JSON anyway generates only a few tokens twice.

A chat whose engine was killed, or crashed on trial: a greedy or seeded chat is requested again from
its beginning, and the client gets exactly the missing rest. The text alone would not reproduce that
rest, because it determines neither the tokens nor the state of the sampler. Without a seed, or if
the new answer begins differently, another engine gets the chat with the partial text as the
assistant's last message and continues it: a plausible rest. This works only for plain text: a
grammar or a tool call would start over.

A chat of low priority that yielded its slot: it is continued from its text, but only if the engine
still has the tokens that it generated (`docs/decisions/queue.md`).

Source: llama-server, build 10434, common/chat.cpp and common/chat-auto-parser-generator.cpp: a
parser with a format has no tools; measured for each `tool_choice`, whole and as a stream. The first
event with text repeats the continued message before the new text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.cache.prompt import read_prompt, with_answer
from proxy.errors import Unfinished, UpstreamFailed
from proxy.forward.response import Abandoned, Discarded, EventTransform, StreamTransform
from proxy.http.api_formats import data_event
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import Splitter, members_of

_KINDS: Final = frozenset({EndpointKind.CHAT, EndpointKind.RESPONSES})
_FORMATS: Final = frozenset({"response_format", "json_schema"})
_HELD_MAX_BYTES: Final = 4 * 1024**2
# The text before a call never begins like this.
_JSON_BEGINS: Final = ("{", "[", "```")
_JSON_BEGIN_MAX: Final = 3


def call_request(request: ProxyRequest) -> ProxyRequest | None:
    """Return the request without its format; None unless it has tools to call and a format."""
    members = request.json
    may_call = bool(members.get("tools")) and members.get("tool_choice") != "none"
    given = members.get("response_format")
    has_type = isinstance(given, dict) and given.get("type") in {"json_schema", "json_object"}
    has_format = has_type or members.get("json_schema") is not None
    if request.kind not in _KINDS or not may_call or not has_format:
        return None
    call = {name: members[name] for name in members if name not in _FORMATS}
    return replace(request, json=call, body=orjson.dumps(call))


def answer_request(request: ProxyRequest) -> ProxyRequest:
    """Return the request for an answer that has the format; its prompt is the same."""
    answer = {**request.json, "tool_choice": "none"}
    return replace(request, json=answer, body=orjson.dumps(answer), is_let_in=True)


class CallOnly(StreamTransform):
    """Holds a response back until a call begins (`is_call`); discards one without a call."""

    is_delayed = True

    def __init__(self, request: ProxyRequest) -> None:
        self.is_call = False
        self._is_single = request.slots == 1
        self._discard_held()

    def _discard_held(self) -> None:
        self._held = bytearray()
        self._splitter = Splitter()
        self._text = ""

    def note_lease(self, lease: Lease) -> None:  # noqa: ARG002 (of any instance)
        self._discard_held()  # of an instance that broke off

    def feed(self, chunk: bytes) -> bytes:
        if self.is_call:
            return chunk
        self._held += chunk
        for piece in self._splitter.objects(chunk):
            if _begins_call(piece):
                self.is_call = True
                return bytes(self._held)
            if len(self._text) < _JSON_BEGIN_MAX:
                self._text = (self._text + _text_of(piece)).lstrip()
        is_json = self._is_single and self._text.startswith(_JSON_BEGINS)
        if is_json or len(self._held) > _HELD_MAX_BYTES:
            raise Discarded
        return b""

    def end(self) -> bytes:
        if not self.is_call:
            raise Discarded
        return b""

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of any status)
        self.is_call = _has_call(orjson.loads(body))
        if not self.is_call:
            raise Discarded
        return body

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:  # noqa: ARG002
        """Ignore a refusal before a call: the second request is refused too, or answered."""
        if not self.is_call:
            raise Discarded
        return body


def _begins_call(piece: Mapping[str, Any]) -> bool:
    match piece:
        case {"type": "response.output_item.added", "item": {"type": "function_call"}}:
            return True
    return any(delta.get("tool_calls") for delta in _parts(piece, "delta"))


def _text_of(piece: Mapping[str, Any]) -> str:
    match piece:
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
    return "".join(str(delta.get("content") or "") for delta in _parts(piece, "delta"))


def _has_call(body: Mapping[str, Any]) -> bool:
    match body:
        case {"output": list(items)}:
            return any(
                isinstance(item, dict) and item.get("type") == "function_call" for item in items
            )
    return any(message.get("tool_calls") for message in _parts(body, "message"))


def _parts(body: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(part := choice.get(name), dict):
            yield part


# A request with one of these cannot be continued.
_BEGIN_ANEW: Final = (
    _FORMATS
    | {"continue_final_message", "functions", "grammar", "tools"}
    | {"logprobs", "n_probs", "return_tokens"}
)
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")
# A request with one of these does not yield: a sampler's state would be lost, the rest would have
# another limit of time, or a stream would show the break.
_RUN_ON: Final = _BEGIN_ANEW | {
    "add_generation_prompt",
    "adaptive_target",
    "mirostat",
    "response_fields",
    "return_progress",
    "t_max_predict_ms",
    "timings_per_token",
    "verbose",
}
_RUN_ON_TEXT: Final = _RUN_ON | {"best_of", "echo", "suffix"}
# The engine treats these as "no seed". Source: llama.cpp, LLAMA_DEFAULT_SEED.
_NO_SEEDS: Final = frozenset({-1, 0xFFFFFFFF})


class AnswerDiffers(Abandoned):
    """The answer to a repeated request began differently."""


def continuations(
    request: ProxyRequest, record: AccessRecord, unfinished: Unfinished
) -> Iterator[tuple[ProxyRequest, Continuation]]:
    """Yield requests for the rest of a stream, the exact one first; none if it has no rest.

    A replay's answer begins again and not at the rest.
    """
    if not (request.is_stream and _is_plain(request, _BEGIN_ANEW)):
        return
    if is_at_limit(request, unfinished.tokens):
        return
    if _is_greedy(request) or _is_seeded(request):
        yield request, Continuation(record, unfinished, is_replay=True)
    yield _rest_of(request, unfinished), Continuation(record, unfinished, is_replay=False)


def _is_plain(request: ProxyRequest, others: Collection[str]) -> bool:
    """Return whether a request is for one chat answer, has no member of `others`, and may go on."""
    members, messages = request.json, request.json.get("messages")
    if request.kind is not EndpointKind.CHAT or request.slots > 1 or others & members.keys():
        return False
    match messages:
        case [] | [*_, {"role": "assistant"}]:
            return False
    return isinstance(messages, list)


def _limits(request: ProxyRequest) -> Mapping[str, int]:
    given = ((name, request.json.get(name)) for name in _LIMITS)
    return {name: limit for name, limit in given if type(limit) is int and limit > 0}


def is_at_limit(request: ProxyRequest, tokens: int) -> bool:
    return any(limit <= tokens for limit in _limits(request).values())


def _is_greedy(request: ProxyRequest) -> bool:
    temperature = request.json.get("temperature")
    return temperature == 0 and temperature is not False


def _is_seeded(request: ProxyRequest) -> bool:
    seed = request.json.get("seed")
    return type(seed) is int and seed not in _NO_SEEDS


def _rest_of(request: ProxyRequest, unfinished: Unfinished) -> ProxyRequest:
    """Return the request for the rest of an answer: its prompt ends with the answer so far."""
    members, text = request.json, unfinished.text
    if text:
        members = with_answer(request.kind, members, text)
    # A limit that was reached before the end was noticed leaves one token.
    limits = {name: max(1, limit - unfinished.tokens) for name, limit in _limits(request).items()}
    members = {**members, **limits}
    prompt = read_prompt(request.kind, request.model, members, request.owner)
    return replace(request, json=members, body=orjson.dumps(members), prompt=prompt)


def may_yield(request: ProxyRequest) -> bool:
    """Return whether the rest of an answer continues it exactly as it would have gone on.

    The engine's random numbers start again, so an answer with a seed is not continued.
    """
    is_plain = _is_plain(request, _RUN_ON) or _is_plain_text(request)
    return is_plain and (_is_greedy(request) or not _is_seeded(request))


def _is_plain_text(request: ProxyRequest) -> bool:
    """Return whether a request is for one whole answer to a raw prompt, and may go on."""
    members = request.json
    is_whole = request.kind is EndpointKind.COMPLETION and not request.is_stream
    is_single = request.slots == 1 and isinstance(members.get("prompt"), str)
    return is_whole and is_single and not _RUN_ON_TEXT & members.keys()


def resumptions(
    request: ProxyRequest, record: AccessRecord, unfinished: Unfinished
) -> Iterator[tuple[ProxyRequest, Continuation]]:
    """Yield requests for the rest of an answer whose request yielded its slot.

    The first continues it if the engine still has exactly the tokens of the answer. The next has
    the right limit, if the answer has more tokens than events. Otherwise a greedy answer is
    computed again, because a prompt that is computed in large batches is rounded otherwise.
    """
    has_all = request.kind is EndpointKind.CHAT
    rest = partial(Continuation, record, is_replay=False, has_all=has_all)
    held = rest(unfinished, must_hold=True)
    yield _rest_of(request, unfinished), held
    if held.counted is not None and held.counted != unfinished.tokens:
        unfinished = replace(unfinished, tokens=held.counted)
        # Of a text in ASCII each token has an event, so its end has other tokens than the answer.
        if not (unfinished.text.isascii() or is_at_limit(request, unfinished.tokens)):
            yield _rest_of(request, unfinished), rest(unfinished, must_hold=True)
    if _is_greedy(request):
        # Stopped before it has more than the client, it would begin again and again.
        again = replace(request, may_yield=False)
        yield again, Continuation(record, unfinished, is_replay=True)
    yield _rest_of(request, unfinished), rest(unfinished)


class Continuation(EventTransform):
    """Passes the rest of an answer, without its beginning and with the id of the first response.

    Raises AnswerDiffers if a replay does not begin as the answer did; with `must_hold`, if the
    engine's cache does not hold the tokens of the answer, or if `unfinished` counts them wrongly.

    Args:
        has_all: Whether the response repeats the answer so far, as those to chats do.

    Attributes:
        counted: The tokens of the answer so far by the engine's count; None if unknown.
    """

    def __init__(
        self,
        record: AccessRecord,
        unfinished: Unfinished,
        *,
        is_replay: bool,
        must_hold: bool = False,
        has_all: bool = True,
    ) -> None:
        super().__init__()
        self.counted: int | None = None
        self._record = record
        self._unfinished = unfinished
        self._is_replay = is_replay
        self._must_hold = must_hold
        self._has_all = has_all
        self._known = unfinished.text  # text that the client has and this response will repeat
        self._has_begun = False

    def note_lease(self, lease: Lease) -> None:
        if self._must_hold:
            lease.progress.expect(self._check_prompt)

    def _check_prompt(self, total: int, cached: int) -> None:
        """Compare the prompt of the rest with the answer so far; its last token is not cached."""
        self.counted = total - self._unfinished.prompt_tokens
        if cached < total - 1 or self.counted != self._unfinished.tokens:
            raise AnswerDiffers

    def so_far(self, part: Unfinished) -> Unfinished:
        """Return the client's answer so far; `part` is the part in this response."""
        before = self._unfinished
        text = part.text if self._has_all else before.text + part.text
        if len(text) <= len(before.text):
            return before
        tokens = part.tokens if self._is_replay else before.tokens + part.tokens
        return replace(before, text=text, tokens=tokens)

    def end(self) -> bytes:
        return self._splitter.take_rest()

    def whole(self, status: int, body: bytes) -> bytes:
        """Correct the counts of an assembled answer; add the text so far if it lacks it."""
        if status != HTTPStatus.OK or self._is_replay:
            return body
        members = orjson.loads(body)
        if "usage" in members:
            members["usage"] = self._whole_usage(members["usage"])
        if not self._has_all:
            members["choices"][0]["text"] = self._unfinished.text + members["choices"][0]["text"]
        return orjson.dumps(members)

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:  # noqa: ARG002
        if self._must_hold:
            raise AnswerDiffers
        raise UpstreamFailed(f"{self._record.instance} could not continue the answer: {status}")

    def event(self, event: bytes) -> bytes:
        members = members_of(event)
        if members is None:
            return event
        changed = {**members, "id": self._unfinished.id or members.get("id")}
        if isinstance(usage := members.get("usage"), dict) and not self._is_replay:
            changed["usage"] = self._whole_usage(usage)
        if members.get("choices"):
            choice = members["choices"][0]
            delta = dict(choice.get("delta") or {})
            if not self._has_begun and not self._begins(delta, choice["finish_reason"]):
                return b""  # the client has it
            changed["choices"] = [{**choice, "delta": delta}]
        return data_event(changed)

    def _begins(self, delta: dict[str, Any], finish_reason: str | None) -> bool:
        """Remove text that the client has from a delta; return whether anything is left to send."""
        text = delta.get("content") or ""
        if not text and not finish_reason:
            return False
        if self._is_replay and not text.startswith(self._known):
            if not text or not self._known.startswith(text):
                raise AnswerDiffers
            self._known = self._known.removeprefix(text)
            return False
        delta["content"] = text.removeprefix(self._known)
        self._has_begun = True
        return bool(delta["content"] or finish_reason or not self._is_replay)

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self._unfinished.tokens
        before = {"completion_tokens": tokens, "prompt_tokens": -tokens}
        counts = {
            name: usage[name] + more
            for name, more in before.items()
            if isinstance(usage.get(name), int)
        }
        return {**usage, **counts}
