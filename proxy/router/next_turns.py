"""Computes the beginning of a conversation's next turn, in its slot, before that turn comes.

A template may write an answer in another way than it was generated, for instance without its
reasoning. The next turn then differs from the slot's content. A recurrent state cannot be cut back,
so such a turn is computed again from a checkpoint, or from its first token, and a slot file of the
state is useless. So after an answer, the history is rendered as the next turn will send it: twice,
with different next messages, because any next turn begins with the common part of both prompts. The
engine computes the tokens of this part that the slot lacks. The slot, and its file, then hold a
pure beginning of the next turn.

This happens only on an engine without requests, if it pays (`pays_to_compute_ahead`), and not on a
machine's battery, unless the settings allow it. No lease is held: a request that gets the instance
aborts the work at once, and finds its slot as if it were idle. If it names the slot, it waits for
the end of the engine's batch. So the work is done in chunks of a tenth of a second. For a recurrent
state or a sliding window, the engine makes a checkpoint, a copy of the state, for each chunk, and
goes back to the last one that a prompt has in common with the slot. So these have few chunks, and
the first chunk ends after that checkpoint: a shorter prompt would remove it.

The form in which a client sends back an answer is learned from its next turn: whole or trimmed,
with or without the reasoning, how it writes the arguments of calls and a call without text, and
whether a user's text comes before the results. A wrong guess costs idle time alone.

Requests of Anthropic's and OpenAI's other APIs are read as the chats that have their prompts. If
such a chat is not as long as the engine reported, the build translates it in another way, and
nothing is computed ahead. A prompt with pictures is sent as text with them; the engine's cache has
their hashes.

Source: llama-server, build 10434: `n_predict` 0 leaves exactly the prompt in the slot;
`/v1/chat/completions` tokenizes the text of `/apply-template`, with special tokens.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import orjson
from attrs import define, field
from multidict import CIMultiDict

from proxy.cache.holders import Conversation
from proxy.cache.host_cache import EMPTY, SlotContent
from proxy.cache.index import CacheHint, PrefixIndex
from proxy.cache.prompt import Prompt, read_prompt
from proxy.cache.save_policy import IDLE_S, IdleBudget, NextTurnCase, pays_to_compute_ahead
from proxy.cache.slot_map import Slot, SlotMap
from proxy.common.headers import JSON
from proxy.errors import ProxyError, UpstreamTimeout
from proxy.observe.record import Emit
from proxy.request.chat_form import (
    SENT_BACK,
    AnswerKind,
    Given,
    SentBack,
    answer_kind,
    chat_answer,
    chat_form,
    next_messages,
    picture_data,
)
from proxy.request.request import ProxyRequest
from proxy.router.engine_faults import ListSlots
from proxy.router.lease import Clock, Lease, RoutingTarget, SlotUse, Tokens
from proxy.router.registry import InstanceTasks
from proxy.router.slot_saver import SlotSaver
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, UpstreamResponse, fetch
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent, Splitter
from proxy.upstream.upstream import Timings, Upstream, average

Message = Mapping[str, Any]

_CHUNK_S: Final = 0.1
_CHUNK_MIN_TOKENS: Final = 32
_CHUNK_MAX_TOKENS: Final = 512
# Of a model that makes checkpoints for each: two, and build 11434 keeps up to 32 of a slot.
_PARTS_MAX: Final = 8
# The engine makes a checkpoint that many tokens, and those of a micro batch, before a prompt's end.
# Source: llama-server, builds 10434 and 11434, checkpoint_offsets.
_END_TOKENS: Final = 4
# Bytes of a token at most, on average over a micro batch.
_TOKEN_MAX_BYTES: Final = 16
# Rendering and reading a longer request takes the event loop some milliseconds. Pictures are copied
# alone.
_BODY_MAX_BYTES: Final = 1024**2
_PICTURES_MAX_BYTES: Final = 4 * _BODY_MAX_BYTES
# A picture in a rendered prompt.
_PICTURE: Final = re.compile(r"<__media\w*__>")
_ANSWER_MAX_BYTES: Final = 32 * 1024**2
_TIMEOUT_S: Final = 20.0
_TURNS_MAX: Final = 512
_DUE_MAX: Final = 32
_TRIES_MAX: Final = 3
# An answer's last token is not in the slot, nor is its end token.
_AWAY_MAX: Final = 2
# Bytes of text for each token of an answer, at least.
_TOKEN_BYTES: Final = 3

# The member with the messages.
_MESSAGES: Final = {
    EndpointKind.CHAT: "messages",
    EndpointKind.MESSAGES: "messages",
    EndpointKind.RESPONSES: "input",
}


_Sequence = TypeVar("_Sequence", str, Sequence[int])


def common_prefix(prompt: _Sequence, other: _Sequence) -> _Sequence:
    shared, most = 0, min(len(prompt), len(other))
    while shared < most:  # both are equal up to `shared`
        middle = (shared + most + 1) // 2
        if prompt[shared:middle] == other[shared:middle]:
            shared = middle
        else:
            most = middle - 1
    return prompt[:shared]


@dataclass(slots=True)
class NextTurnCounts:
    """Next turns of one model that were computed ahead, since the start."""

    computed: int = 0  # Next turns.
    aborted: int = 0  # By requests.
    computed_tokens: int = 0
    used_tokens: int = 0  # Computed tokens that the next turn found.
    missed_tokens: int = 0  # Computed tokens that the next turn did not find: a wrong guess.
    duration_s: float = 0.0


# Tokens, or text with pictures.
_Beginning = Sequence[int] | Message
# A request and its answer, and both as the chat API has them.
_Exchange = tuple[ProxyRequest, Message, Message, Message]


@dataclass(slots=True)
class _Turn:
    """The latest turn of a conversation."""

    given: Given
    place: int  # Index of its answer among the messages of the next request.
    prompt_tokens: int
    found_tokens: int  # Tokens of the prompt that the engine found.
    held_tokens: int  # Tokens that the slot holds after the answer.
    next_tokens: int  # Estimated tokens of the prompt with the answer, as a client sees it.
    # Tokens that were computed ahead of this turn: the engine has a checkpoint near their end.
    checkpoint_tokens: int
    # Request and answer; None once the next turn is computed, or will not be.
    exchange: _Exchange | None
    tries: int = 0
    sent_tokens: int = 0  # Tokens of the next turn that were sent; the slot may hold them.
    ahead_tokens: int = 0  # Tokens of the next turn that the slot holds; 0: not computed ahead.
    computed_tokens: int = 0  # Those of them that were computed ahead.


@define(eq=False)
class _Work:
    """The work on one next turn; it holds the slot once that is reserved."""

    conversation: Conversation
    slot_map: SlotMap
    slot: Slot | None = None  # None until it is reserved.
    before: SlotContent = EMPTY  # The slot's content before.
    response: UpstreamResponse | None = None
    is_aborted: bool = False
    tokens: int = 0  # Tokens of the next turn in the slot.
    used: Tokens = field(factory=Tokens)

    def give_back(self, now_s: float) -> None:
        """Free the slot, which holds the conversation even if the work is not done."""
        self.slot_map.release(self, now_s)
        if self.slot and self.slot.conversation is None:
            tokens = self.tokens or self.before.tokens
            blocks = self.before.blocks
            self.slot_map.set_conversation(self.slot, self.conversation, tokens, blocks)


@define(eq=False, slots=False, kw_only=True)
class NextTurns:
    """Computes the next turns of conversations while instances are idle and `tasks` run.

    Attributes:
        due: Conversations whose next turn waits or is being computed, with their instance.
        running: The turns that are computed now.
        counts: By model.
    """

    _prefix_index: PrefixIndex
    _settings: ProxySettings
    _saver: SlotSaver
    _clock: Clock
    _list_slots: ListSlots
    _tasks: InstanceTasks
    _emit: Emit
    _is_on_battery: Callable[[], bool]
    _slots_taken: Callable[[Hashable, Upstream, int], None]
    _slots_freed: Callable[[Hashable, SlotUse], None]
    running: dict[RoutingTarget, _Work] = field(factory=dict, init=False)
    _turns: OrderedDict[Conversation, _Turn] = field(factory=OrderedDict, init=False)
    _sent_back: OrderedDict[tuple[str, str, EndpointKind], SentBack] = field(
        factory=OrderedDict, init=False
    )
    _kept_p: dict[tuple[str, AnswerKind], float] = field(factory=dict, init=False)
    _budgets: dict[str, IdleBudget] = field(factory=dict, init=False)
    _ended_at_s: dict[str, float] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.due = self._saver.postponed
        self.counts: defaultdict[str, NextTurnCounts] = defaultdict(NextTurnCounts)

    def note_turn(self, lease: Lease, timings: Timings, reply: Message) -> int:
        """Note the answer to a conversation's turn, whose next turn may be computed later.

        Returns how many of the tokens that the turn found were computed ahead of it.
        """
        conversation, upstream = lease.conversation, lease.upstream
        request = lease.request
        if conversation is None or request.kind not in _MESSAGES:
            return 0
        turn, used, chat = self._turns.pop(conversation, None), 0, None
        if turn:
            self.due.pop(conversation, None)
            chat = chat_form(request.kind, request.json)
            used = self._learn(turn, lease, timings, chat["messages"] if chat else ())
        is_chat = request.kind is EndpointKind.CHAT
        answer = reply if is_chat else chat_answer(request.kind, reply)
        is_plain = answer_kind(answer) == "text" and not upstream.is_all_or_nothing
        if is_plain or not self._may(lease):
            return used
        given, chat = Given.of(answer), chat or chat_form(request.kind, request.json)
        if chat is None or not _may_follow(chat["messages"], len(request.body)):
            return used
        prompt_tokens = timings.cached_tokens + timings.prompt_tokens
        text_bytes = len(orjson.dumps([answer.get("content"), answer.get("tool_calls")]))
        self._turns[conversation] = _Turn(
            given,
            len(chat["messages"]),
            prompt_tokens,
            timings.cached_tokens,
            prompt_tokens + timings.decoded_tokens,
            prompt_tokens + min(timings.decoded_tokens, text_bytes // _TOKEN_BYTES),
            turn.ahead_tokens if turn else 0,
            (request, reply, chat, answer),
        )
        if len(self._turns) > _TURNS_MAX:
            self._turns.popitem(last=False)
        self.due[conversation] = lease.instance
        if len(self.due) > _DUE_MAX:
            self._drop(next(iter(self.due)))
        return used

    def note_end(self, instance: RoutingTarget) -> None:
        """Note that a request of an instance has ended; call it while turns are due."""
        self._ended_at_s[instance.upstream.name] = self._clock()
        if instance in self.due.values():
            self._tasks.wake("next_turns", instance, self._compute_due)

    def abort(self, instance: RoutingTarget) -> None:
        """Stop computing on an instance at once, because a request needs it."""
        work = self.running.pop(instance)
        work.is_aborted = True
        if work.response:
            work.response.close()
        work.give_back(self._clock())
        self.counts[instance.upstream.model].aborted += 1

    def _may(self, lease: Lease) -> bool:
        """Return whether a next turn could be computed, in its own slot."""
        request, upstream, members = lease.request, lease.upstream, lease.request.json
        is_plain = request.slots == 1 and members.get("cache_prompt") is not False
        is_plain = is_plain and not lease.is_cache_off
        may_run = self._tasks.are_running and self._settings.ahead_share > 0
        return is_plain and may_run and upstream.can_name_slots and upstream.node is None

    def _learn(
        self, turn: _Turn, lease: Lease, timings: Timings, messages: Sequence[Message]
    ) -> int:
        """Learn the form of the previous answer; return the tokens that were computed ahead."""
        request, model = lease.request, lease.upstream.model
        match messages[turn.place : turn.place + 2]:
            case [{"role": "assistant"} as sent, dict(following)]:
                known = self._known(request).after(turn.given, sent, following)
                self._sent_back[_client(request)] = known
                self._sent_back.move_to_end(_client(request))
        if len(self._sent_back) > _TURNS_MAX:
            self._sent_back.popitem(last=False)
        if turn.ahead_tokens:
            counts = self.counts[model]
            if timings.cached_tokens >= turn.ahead_tokens - _AWAY_MAX:
                counts.used_tokens += turn.computed_tokens
                return turn.computed_tokens
            counts.missed_tokens += turn.computed_tokens
        elif lease.has_own_slot:
            self._note_kept(model, turn, timings)
        return 0

    def _known(self, request: ProxyRequest) -> SentBack:
        """Return the parts of answers that the client of a request sends back."""
        found = self._sent_back.get(_client(request))
        return found or SENT_BACK.get(request.kind, SentBack())

    def _note_kept(self, model: str, turn: _Turn, timings: Timings) -> None:
        """Note whether a prompt continued all that its slot held after the answer."""
        is_kept = float(timings.cached_tokens >= turn.held_tokens - _AWAY_MAX)
        key = model, turn.given.kind
        self._kept_p[key] = average(self._kept_p.get(key, is_kept), is_kept)

    async def _compute_due(self, instance: RoutingTarget, ended: asyncio.Event) -> None:
        """Compute the next turns of an instance's conversations whenever it is idle."""
        while instance.in_service and (conversation := self._next_due(instance)):
            ended.clear()
            wait_s = self._ended_at_s[instance.upstream.name] + IDLE_S - self._clock()
            if instance.leases or wait_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if instance.leases else wait_s):
                        await ended.wait()
            elif not await self._compute(instance, conversation):
                self._drop(conversation)
                if instance.upstream.cache_key:
                    self._saver.note_end(instance)
        while conversation := self._next_due(instance):
            self._drop(conversation)

    def _next_due(self, instance: RoutingTarget) -> Conversation | None:
        return next((due for due, target in self.due.items() if target is instance), None)

    def _drop(self, conversation: Conversation) -> None:
        self.due.pop(conversation, None)
        if turn := self._turns.get(conversation):
            turn.exchange = None

    async def _compute(self, instance: RoutingTarget, conversation: Conversation) -> bool:
        """Compute a next turn if that pays; return whether to try again later."""
        upstream, turn = instance.upstream, self._turns.get(conversation)
        slot_map = self._prefix_index.slot_maps.get(upstream.name)
        if slot_map is None or turn is None or turn.exchange is None or turn.tries >= _TRIES_MAX:
            return False
        case, now_s = self._case(upstream, conversation, turn), self._clock()
        expected_s = (case.tokens - case.found_tokens) / instance.rates.prefill_tps
        if (budget := self._budgets.get(upstream.name)) is None:
            share = self._settings.ahead_share
            budget = self._budgets[upstream.name] = IdleBudget(share, now_s)
        if not (pays_to_compute_ahead(case) and budget.allows(expected_s, now_s)):
            return False
        if self._is_on_battery() and not self._settings.ahead_on_battery:
            return False
        turn.tries += 1
        work = self.running[instance] = _Work(conversation, slot_map)
        self._slots_taken(work, upstream, 1)
        try:
            with suppress(ProxyError, InvalidEvent):  # a request reports the fault
                await self._run(instance, work, turn, turn.exchange)
        finally:
            duration_s, counts = self._clock() - now_s, self.counts[upstream.model]
            budget.spend(duration_s)
            counts.duration_s += duration_s
            counts.computed_tokens += work.used.prompt
            self._slots_freed(
                work,
                SlotUse(
                    "(ahead)",
                    upstream.model,
                    upstream.name,
                    work.used,
                    duration_s,
                    is_exact=not work.is_aborted,
                ),
            )
            if self.running.get(instance) is work:
                del self.running[instance]
                work.give_back(self._clock())
        return work.is_aborted and turn.tries < _TRIES_MAX

    def _case(self, upstream: Upstream, conversation: Conversation, turn: _Turn) -> NextTurnCase:
        measures, now_s = self._prefix_index.measures[upstream.model], self._clock()
        is_all_or_nothing = upstream.is_all_or_nothing
        return NextTurnCase(
            turn.next_tokens,
            turn.checkpoint_tokens if is_all_or_nothing else turn.prompt_tokens,
            measures.returns.return_p(conversation.number, now_s),
            measures.loss_p if is_all_or_nothing else 0.0,
            self._kept_p.get((upstream.model, turn.given.kind), 0.0),
        )

    async def _run(
        self,
        instance: RoutingTarget,
        work: _Work,
        turn: _Turn,
        exchange: _Exchange,
    ) -> None:
        upstream, began_at_s = instance.upstream, self._clock()
        beginning, text = await self._beginning(upstream, exchange, turn.prompt_tokens)
        if not (beginning and await self._reserve(upstream, work)):
            return
        done = await self._done_tokens(upstream, turn, exchange[2], beginning, text)
        is_first = True
        if work.is_aborted:
            return
        for prompt in _parts(instance, beginning, done):
            turn.sent_tokens = len(prompt)
            timings = await self._prefill(upstream, work, exchange[0], prompt)
            if timings is None or work.is_aborted:
                return
            work.tokens = timings.cached_tokens + timings.prompt_tokens
            work.used += Tokens(
                timings.prompt_tokens, timings.cached_tokens, timings.decoded_tokens
            )
            if is_first and turn.tries == 1:
                self._note_kept(upstream.model, turn, timings)
            is_first = False
        del self.running[instance]
        work.give_back(self._clock())
        if work.slot and (read := _next_prompt(upstream.model, *exchange[:2])):
            self._prefix_index.assign(
                upstream, read, None, CacheHint(conversation=work.conversation)
            )
            work.slot_map.set_conversation(work.slot, work.conversation, work.tokens, read.blocks)
        turn.ahead_tokens, turn.computed_tokens = work.tokens, work.used.prompt
        self.counts[upstream.model].computed += 1
        self._emit(
            "next_turn.computed",
            instance=upstream.name,
            model=upstream.model,
            tokens=work.tokens,
            computed=work.used.prompt,
            duration_ms=round(1000 * (self._clock() - began_at_s), 1),
        )

    async def _beginning(
        self, upstream: Upstream, exchange: _Exchange, prompt_tokens: int
    ) -> tuple[_Beginning, str]:
        """Return the beginning of any next turn, and its text; empty if the engine does not tell.

        `prompt_tokens` is how many it reported for the request.
        """
        request, _, chat, answer = exchange
        known, pictures = self._known(request), picture_data(chat["messages"])
        if request.kind is not EndpointKind.CHAT:
            text = await self._render(upstream, chat)
            if pictures or len(await self._tokens(upstream, text)) != prompt_tokens:
                return [], ""
        turns = next_messages(
            chat["messages"], known.message(answer), has_user_first=known.has_user_first
        )
        texts = [await self._render(upstream, {**chat, "messages": turn}) for turn in turns]
        tokens = common_prefix(*[await self._tokens(upstream, text) for text in texts])
        common = common_prefix(*texts)
        if not pictures:
            return tokens, common
        for text in (common, common.rstrip()):
            read = await self._tokens(upstream, text)
            if read == tokens[: len(read)] and len(_PICTURE.findall(text)) == len(pictures):
                return {"prompt_string": text, "multimodal_data": pictures}, text
        return [], ""

    async def _done_tokens(
        self, upstream: Upstream, turn: _Turn, chat: Message, beginning: _Beginning, text: str
    ) -> int:
        """Return about how many tokens of a beginning the engine finds in the slot, at most.

        A recurrent state goes back to a checkpoint: after the tokens that the request found, before
        its last user's message, or near the end of its prompt.

        Args:
            upstream: The instance.
            turn: The turn before.
            chat: Its request.
            beginning: The tokens with which the next turn begins.
            text: The text of `beginning`.
        """
        if turn.sent_tokens or isinstance(beginning, Mapping) or not upstream.is_all_or_nothing:
            return max(turn.sent_tokens, turn.prompt_tokens)
        prompt, is_recurrent = await self._render(upstream, chat), upstream.resumable_prompts
        common = common_prefix(prompt, text)
        is_other = is_recurrent and len(beginning) < turn.held_tokens
        if not prompt or (common == prompt and not is_other):
            return turn.held_tokens  # it may continue the answer as it was generated
        micro_batch, near_end = upstream.micro_batch_tokens, turn.prompt_tokens - _END_TOKENS
        rest = len(await self._tokens(upstream, prompt[len(common) :]))
        user_at = prompt.rfind(_last_user_text(chat["messages"]))
        if not (is_recurrent and micro_batch) or rest <= 2 * _END_TOKENS or user_at < 0:
            return turn.prompt_tokens - rest
        found = max(turn.found_tokens, near_end - micro_batch)
        if len(prompt) - user_at <= micro_batch * _TOKEN_MAX_BYTES:
            since_user = len(await self._tokens(upstream, prompt[user_at:]))
            found = max(found, turn.prompt_tokens - since_user)
        return min(found, turn.prompt_tokens - rest)

    async def _render(self, upstream: Upstream, chat: Message) -> str:
        """Return the prompt of a chat; empty if the engine does not tell."""
        text = (await self._post(upstream, "/apply-template", chat)).get("prompt")
        return text if isinstance(text, str) else ""

    async def _tokens(self, upstream: Upstream, text: str) -> Sequence[int]:
        """Return the tokens of a prompt; none if the engine does not tell."""
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = (await self._post(upstream, "/tokenize", body)).get("tokens")
        return tokens if text and isinstance(tokens, list) else []

    async def _reserve(self, upstream: Upstream, work: _Work) -> bool:
        """Reserve the slot that holds the conversation, and note that a task begins there."""
        slot = work.slot_map.find(work.conversation)
        if slot and not slot.is_confirmed:
            with suppress(UpstreamTimeout):
                listed = await self._list_slots(upstream) or ()
                if not work.is_aborted:
                    work.slot_map.sync(listed, None, self._clock())
            slot = work.slot_map.find(work.conversation)
        if work.is_aborted or slot is None or not (slot.is_idle and slot.is_confirmed):
            return False
        work.slot, work.before = slot, slot.content
        work.slot_map.reserve(work, work.conversation, self._clock())
        work.slot_map.mark_sent(slot, is_named=True)
        return True

    async def _prefill(
        self, upstream: Upstream, work: _Work, request: ProxyRequest, prompt: _Beginning
    ) -> Timings | None:
        """Compute a prompt in the reserved slot; None if the engine refused it."""
        members = {
            "prompt": prompt,
            "n_predict": 0,
            "cache_prompt": True,
            "id_slot": work.slot and work.slot.id_slot,
            # An engine notices only of a stream that its client has left.
            "stream": True,
            "return_progress": True,
        }
        if lora := request.json.get("lora"):
            members["lora"] = lora
        sent = _request("/completion", members)
        splitter, timings = Splitter(), None
        work.response = UpstreamResponse(upstream, sent, self._settings)
        async with work.response as response:
            while not work.is_aborted and (chunk := await response.read()):
                for piece in splitter.objects(chunk):
                    timings = Timings.read(piece.get("timings")) or timings
        return timings

    async def _post(self, upstream: Upstream, path: str, members: Message) -> Message:
        """Return the members of an answer; none if it is no success."""
        sent = _request(path, members)
        page = await fetch(upstream, sent, self._settings, _TIMEOUT_S, _ANSWER_MAX_BYTES)
        with suppress(orjson.JSONDecodeError):
            found = orjson.loads(page.body)
            return found if page.status == HTTPStatus.OK and isinstance(found, dict) else {}
        return {}


def _request(path: str, members: Message) -> UpstreamRequest:
    headers = CIMultiDict({"Content-Type": JSON})
    return UpstreamRequest("POST", path, "", headers, orjson.dumps(members))


def _client(request: ProxyRequest) -> tuple[str, str, EndpointKind]:
    return request.client, request.headers.get("User-Agent", ""), request.kind


def _next_prompt(model: str, request: ProxyRequest, reply: Message) -> Prompt | None:
    """Return the prompt of a request and its answer, as the client's API has it."""
    name = _MESSAGES[request.kind]
    given = request.json[name]
    before = [{"role": "user", "content": given}] if isinstance(given, str) else given
    members = {**request.json, name: [*before, {"role": "assistant", **reply}]}
    return read_prompt(request.kind, model, members, request.owner)


def _may_follow(messages: Sequence[Message], size_bytes: int) -> bool:
    """Return whether an answer follows the messages, and all are text or pictures."""
    if not messages or messages[-1].get("role") == "assistant" or size_bytes > _PICTURES_MAX_BYTES:
        return False
    pictures = picture_data(messages)
    return pictures is not None and (bool(pictures) or size_bytes <= _BODY_MAX_BYTES)


def _last_user_text(messages: Sequence[Message]) -> str:
    """Return the last text of the last user's message; empty if there is none."""
    contents = (message.get("content") for message in messages if message.get("role") == "user")
    match [*contents]:
        case [*_, str(text)] | [*_, [*_, {"text": str(text)}]]:
            return text.strip()
    return ""


def _parts(instance: RoutingTarget, beginning: _Beginning, done: int) -> Iterator[_Beginning]:
    """Yield growing parts of a beginning, of which the slot may hold `done` tokens."""
    if isinstance(beginning, Mapping):
        yield beginning
        return
    tokens_now = round(instance.rates.prefill_tps * _CHUNK_S)
    chunk = min(_CHUNK_MAX_TOKENS, max(_CHUNK_MIN_TOKENS, tokens_now))
    end = max(0, min(done, len(beginning) - 1))
    if instance.upstream.is_all_or_nothing:
        chunk = max(chunk, math.ceil((len(beginning) - end) / _PARTS_MAX))
    while end < len(beginning):
        end = min(len(beginning), end + chunk)
        yield beginning[:end]
