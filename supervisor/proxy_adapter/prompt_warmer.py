"""What the proxy needs of whoever has prompts read ahead, and keeps those that it saw often."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from proxy.errors import BadRequest, Unavailable
from proxy.models import PrefillResult
from proxy.prompt_cache.shared_prefixes import SharedPrefix
from proxy.router.router import Router
from supervisor.errors import CorralError, DaemonBusy, SettingsInvalid
from supervisor.events import Emit
from supervisor.fleet import cache_commands
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.proxy_adapter.redact import without_directories
from supervisor.warmup import prompts
from supervisor.warmup.learned import save_and_emit


class PromptWarmerAdapter:
    """What the proxy needs of whoever has prompts read ahead (proxy.models.Reader)."""

    def __init__(self, fleet: Fleet, router: Router, emit: Emit) -> None:
        self._fleet = fleet
        self._router = router
        self._emit = emit

    def learns(self, model: str) -> bool:
        """Return whether openings of a model's conversations are learned."""
        return self._fleet.planner.learns_prompts(model)

    def learn(self, model: str, opening: SharedPrefix) -> None:
        """Keep what conversations of a model begin with; a daemon that ends does not any more."""
        learned = self._fleet.planner.learned
        with suppress(DaemonBusy):
            self._fleet.spawn(
                save_and_emit(learned, model, opening.body, opening.tokens, self._emit)
            )

    async def warm(self, model: str, body: Mapping[str, Any]) -> list[PrefillResult]:
        """Have every instance of a model that is up read a prompt; clients come first.

        Raises:
            BadRequest: The body is no chat request, or an instance refused it.
            Unavailable: None is up, or one did not come to it.
        """
        try:
            prompt = prompts.of_request("in the body", body)
            found = await cache_commands.warm(self._replicas(model), prompt, self._router)
        except SettingsInvalid as error:
            raise BadRequest(f"{error.message}; {error.hint}") from error
        if isinstance(found, SettingsInvalid):
            raise BadRequest(without_directories(found.message))
        if isinstance(found, CorralError):
            told = without_directories(f"{found.message}; {found.hint}")
            raise Unavailable(told, retry_after_s=10)
        return found

    def _replicas(self, name: str) -> tuple[Replica, ...]:
        model = self._fleet.models.get(name)  # it may be configured no more by now
        return model.replicas if model else ()
