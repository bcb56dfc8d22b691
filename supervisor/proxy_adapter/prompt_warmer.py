"""Prefills prompts, and saves shared prefixes, for the proxy (proxy.models.PromptWarmer)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from proxy.errors import BadRequest, ModelLoading, NotLoaded, Unavailable
from proxy.models import PrefillResult
from proxy.prompt_cache.shared_prefixes import SharedPrefix
from proxy.router.router import Router
from supervisor.errors import CorralError, DaemonBusy, SettingsInvalid
from supervisor.events import Emit
from supervisor.fleet import cache_commands
from supervisor.fleet.availability import availability
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.proxy_adapter.model_loader import failure
from supervisor.proxy_adapter.prefix_files import PrefixFiles
from supervisor.proxy_adapter.redact import without_directories
from supervisor.warmup import prompts
from supervisor.warmup.learned import save_and_emit


class PromptWarmerAdapter:
    def __init__(self, fleet: Fleet, router: Router, prefix_files: PrefixFiles, emit: Emit) -> None:
        self._fleet = fleet
        self._router = router
        self._prefix_files = prefix_files
        self._emit = emit

    def learns(self, model: str) -> bool:
        launches = self._fleet.planner.launches
        return launches.learns_prompts(model) or self._router.stores_prefixes(model)

    def learn(self, model: str, prefix: SharedPrefix) -> None:
        if self._router.stores_prefixes(model):
            self._prefix_files.want(model, prefix)
        if not self._fleet.planner.launches.learns_prompts(model):
            return
        learned = self._fleet.planner.launches.learned
        with suppress(DaemonBusy):  # the daemon is stopping
            self._fleet.spawn(save_and_emit(learned, model, prefix.body, prefix.tokens, self._emit))

    async def warm(self, model: str, body: Mapping[str, Any]) -> list[PrefillResult]:
        """Prefill a prompt on every instance that serves; clients take precedence.

        Raises:
            BadRequest: The body is not a chat request, or an instance rejected it.
            Unavailable: The model does not serve, or an instance was busy for too long.
        """
        self._check_serving(model)
        try:
            prompt = prompts.of_request("in the body", body)
            found = await cache_commands.warm(self._replicas(model), prompt, self._router)
        except SettingsInvalid as error:
            raise BadRequest(f"{error.message}; {error.hint}") from error
        if isinstance(found, SettingsInvalid):
            raise BadRequest(without_directories(found.message))
        if isinstance(found, CorralError):
            message = without_directories(f"{found.message}; {found.hint}")
            raise Unavailable(message, retry_after_s=10)
        return found

    def _check_serving(self, name: str) -> None:
        """Raise what other endpoints say of a model that does not serve."""
        if (model := self._fleet.models.get(name)) is None:
            return
        state, reason = availability(model)
        if state == "failed":
            raise failure(model, reason)
        if state == "loading":
            raise ModelLoading(f"{name} is still loading; retry later", retry_after_s=10)
        if state == "unloaded":
            raise NotLoaded(f"{name} is not loaded; run `corral load {name}` first")

    def _replicas(self, name: str) -> tuple[Replica, ...]:
        model = self._fleet.models.get(name)  # a reload may have removed it
        return model.replicas if model else ()
