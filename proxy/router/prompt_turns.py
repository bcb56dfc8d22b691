"""The turns of prompts on the instances of one model that prefer pure decode.

The rule is `prefill_admission`. Without such an instance, prompts take no turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.prompt_cache.cache_hint import CacheHint
from proxy.prompt_cache.index import PrefixIndex
from proxy.router.instance_registry import Instances
from proxy.router.instances import Instance
from proxy.router.prefill_admission import prefill_wait_s, shortest_first
from proxy.router.queued_request import QueuedRequest


class PromptTurns:
    def __init__(self, model: str, instances: Instances, prefix_index: PrefixIndex) -> None:
        self._model = model
        self._instances = instances
        self._prefix_index = prefix_index

    def order(self, entries: Iterable[QueuedRequest]) -> Iterable[QueuedRequest]:
        """Return waiting requests in the order in which their prompts would begin."""
        if not self._in_service():
            return entries
        return shortest_first(tuple(entries), lambda queued: queued.new_tokens)

    def waits(
        self, instances: Sequence[Instance], queued: QueuedRequest, hint: CacheHint, now_s: float
    ) -> dict[str, float]:
        """Return those where another prompt comes first, and for how long at most."""
        prompt = queued.request.prompt
        found: dict[str, float] = {}
        for one in instances:
            if prompt:
                new_tokens = prompt.tokens - hint.cached_tokens(one.bit)
                waited_s = now_s - queued.joined_at_s
                if wait_s := prefill_wait_s(one.work, new_tokens, waited_s, queued.timeout_s):
                    found[one.upstream.name] = wait_s
        return found

    def new_tokens(self, queued: QueuedRequest) -> int:
        """Return how many tokens of a prompt will be computed; 0 where nothing depends on it."""
        prompt, instances = queued.request.prompt, self._in_service()
        if prompt is None or not instances:
            return 0
        hint = self._prefix_index.look_up(prompt, queued.session)
        return prompt.tokens - hint.cached_tokens(sum(one.bit for one in instances))

    def is_beside_free_slot(self) -> bool:
        """Return whether requests may wait although a slot is free."""
        return any(one.has_free_slot for one in self._in_service())

    def _in_service(self) -> Sequence[Instance]:
        return self._instances.of(self._model).pure
