"""Goes on with a chat whose stream broke off because its engine was killed, or crashed on trial.

A chat that is greedy or has a seed is asked for again from its beginning, and the client gets what
it lacks of that: exactly the rest that it would have got. From the text alone that cannot be had,
which says neither how it was cut into tokens nor where the sampler was. If it begins differently,
or without a seed, another engine gets the chat with the text so far as the assistant's last
message, which it continues: the rest is one that could have come.

Only if the stream so far is plain text: a grammar or a tool call would start over.

Source: llama-server, build 10434: the first event with text has the continued message in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.errors import Unfinished, UpstreamFailed
from proxy.forward.client_response import ResponseWriter
from proxy.forward.passed_response import PassedResponse
from proxy.request import ProxyRequest
from proxy.upstream.sse import Splitter, members_of

_BEGIN_ANEW: Final = frozenset(
    (
        "continue_final_message",
        "functions",
        "grammar",
        "json_schema",
        "logprobs",
        "n_probs",
        "response_format",
        "return_tokens",
        "tools",
    )
)
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")


# What the engine takes for "no seed". Source: llama.cpp, LLAMA_DEFAULT_SEED.
_NO_SEEDS: Final = frozenset({-1, 0xFFFFFFFF})


class AnswerDiffers(Exception):
    """An engine that was asked again began its answer differently."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """How the rest is asked for.

    Attributes:
        is_replay: Whether the answer begins again, not at the rest.
    """

    request: ProxyRequest
    unfinished: Unfinished
    is_replay: bool


def continuations(request: ProxyRequest, unfinished: Unfinished | None) -> Iterator[Continuation]:
    """Yield the ways to get the rest of a stream, the exact one first; none if it has no rest."""
    members = request.json
    is_plain = request.kind is EndpointKind.CHAT and request.is_stream and request.slots == 1
    messages = members.get("messages")
    if unfinished is None or not is_plain or _BEGIN_ANEW & members.keys():
        return
    if not isinstance(messages, list) or _is_assistant(messages[-1:]):
        return
    limits = {
        name: members[name] - unfinished.tokens for name in _LIMITS if _is_limit(members.get(name))
    }
    if any(rest <= 0 for rest in limits.values()):
        return
    if _is_repeatable(members):
        yield Continuation(request, unfinished, is_replay=True)
    said = [{"role": "assistant", "content": unfinished.text}] if unfinished.text else []
    rest = {**members, **limits, "messages": [*messages, *said]}
    asked = replace(request, json=rest, body=orjson.dumps(rest))
    yield Continuation(asked, unfinished, is_replay=False)


def _is_repeatable(members: Mapping[str, Any]) -> bool:
    """Whether the same request gets the same answer again."""
    seed, temperature = members.get("seed"), members.get("temperature")
    is_seeded = isinstance(seed, int) and not isinstance(seed, bool) and seed not in _NO_SEEDS
    return is_seeded or (temperature == 0 and temperature is not False)


def _is_limit(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_assistant(last: list[object]) -> bool:
    return not last or (isinstance(last[0], dict) and last[0].get("role") == "assistant")


class ContinuedResponse(PassedResponse[ResponseWriter]):
    """Sends the rest of a stream: without its beginning, under the first one's id.

    Raises AnswerDiffers if a replay does not begin as the answer did.
    """

    def __init__(self, writer: ResponseWriter, rest: Continuation) -> None:
        super().__init__(writer)
        self._rest = rest
        self._known = rest.unfinished.text  # text that the client has and that is still to come
        self._splitter = Splitter()
        self._is_begun = False

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Nothing: the client has the header."""

    async def write(self, chunk: bytes) -> None:
        if events := self._continued(self._splitter.feed(chunk)):
            await self._writer.write(events)

    def put(self, chunk: bytes) -> bool:  # noqa: ARG002 (left to `write`)
        return False

    async def finish(self, last: bytes = b"") -> None:
        events = self._continued(self._splitter.feed(last))
        await self._writer.finish(events + self._splitter.rest())

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:  # noqa: ARG002
        raise UpstreamFailed(f"{self.record.instance} could not continue the answer: {status}")

    def _continued(self, events: Iterable[bytes]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: bytes) -> bytes:
        members = members_of(event)
        if members is None:
            return event
        changed = {**members, "id": self._rest.unfinished.id or members.get("id")}
        if isinstance(usage := members.get("usage"), dict) and not self._rest.is_replay:
            changed["usage"] = self._whole_usage(usage)
        if members.get("choices"):
            choice = members["choices"][0]
            delta = dict(choice.get("delta") or {})
            if not self._is_begun and not self._begins(delta, choice["finish_reason"]):
                return b""  # the client knows it
            changed["choices"] = [{**choice, "delta": delta}]
        return b"data: " + orjson.dumps(changed) + b"\n\n"

    def _begins(self, delta: dict[str, Any], finish_reason: str | None) -> bool:
        """Take what the client knows out of a delta; return whether anything is left to send."""
        text = delta.get("content") or ""
        if not text and not finish_reason:
            return False
        if self._rest.is_replay and not text.startswith(self._known):
            if not text or not self._known.startswith(text):
                raise AnswerDiffers
            self._known = self._known.removeprefix(text)
            return False
        delta["content"] = text.removeprefix(self._known)
        self._is_begun = True
        return bool(delta["content"] or finish_reason or not self._rest.is_replay)

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self._rest.unfinished.tokens
        before = {"completion_tokens": tokens, "prompt_tokens": -tokens}
        counts = {
            name: usage[name] + more
            for name, more in before.items()
            if isinstance(usage.get(name), int)
        }
        return {**usage, **counts}
