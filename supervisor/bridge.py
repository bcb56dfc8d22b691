"""Where the two packages meet: a READY instance becomes an upstream of the proxy, and back.

Instances steer traffic through `Gate`, the proxy asks for models through `Catalogue`. Neither
package knows the other: this file knows both.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Final, Literal

from proxy.dispatch import Dispatch, ModelCard
from proxy.errors import Loading, Unavailable, UnknownModel
from proxy.settings import ProxySettings
from proxy.upstream import Upstream
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica import Model
from supervisor.life.facts import InstanceFacts
from supervisor.life.lifecycle import State
from supervisor.life.traffic import Pulse
from supervisor.settings import ProxyTable

# How long a request waits for a model that is on its way before it is told to ask again.
_PATIENCE_S: Final = 120.0


class Gate:
    """What instances need of the proxy (supervisor.life.traffic.Traffic).

    Attributes:
        fleet: Set once the fleet is made, which needs the gate first.
    """

    fleet: Fleet

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def admit(self, facts: InstanceFacts) -> None:
        """Let requests come to an instance."""
        model, plan = self.fleet.models[facts.model], self.fleet.replica(facts.name).plan
        endpoint = facts.endpoint
        upstream = Upstream(
            name=facts.name,
            model=facts.model,
            slots=plan.slots if plan else 1,
            socket=str(endpoint.socket) if endpoint.socket else None,
            host=endpoint.host,
            port=endpoint.port,
            api_key=facts.api_key,
            aliases=model.entry.aliases,
        )
        self._dispatch.admit(upstream)

    def withdraw(self, name: str) -> None:
        """Let no more requests come to an instance; those it has go on."""
        self._dispatch.withdraw(name)

    def pulse(self, name: str) -> Pulse:
        """Return what an instance does for clients now."""
        pulse = self._dispatch.pulse(name)
        return Pulse(pulse.held, pulse.awaited, pulse.bytes_heard)

    async def idle(self, name: str) -> None:
        """Wait until an instance has no request; the caller sets the deadline."""
        await self._dispatch.idle(name)

    async def close(self, name: str) -> None:
        """Break off what an instance still has."""
        await self._dispatch.close(name)


class Catalogue:
    """What the proxy needs of the fleet (proxy.dispatch.Loader)."""

    def __init__(self, fleet: Fleet, events: EventStream) -> None:
        self._fleet = fleet
        self._events = events
        self._created = int(datetime.now(tz=UTC).timestamp())

    def models(self) -> list[ModelCard]:
        """Return every configured model, up or not."""
        models = self._fleet.models.values()
        return [self._card(model) for model in models if model.is_configured]

    async def ensure_ready(self, model: str) -> None:
        """Wait for a model that is on its way.

        Raises:
            Loading: It takes too long.
            Unavailable: It is not on its way: stopped, or failed.
            UnknownModel: It is configured no more.
        """
        found = self._fleet.models.get(model)
        if found is None or not found.is_configured:  # since the request was read
            raise UnknownModel(model, [card.id for card in self.models()])
        with self._events.listen() as changes:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    while availability(found)[0] == "loading":
                        await changes.next()
            except TimeoutError:
                raise Loading(f"{model} is still loading; ask again", retry_after_s=10) from None
        state, reason = availability(found)
        if state != "loaded":
            raise Unavailable(f"{model} cannot answer: {reason}", retry_after_s=10)

    def _card(self, model: Model) -> ModelCard:
        plan = model.plan
        state, reason = availability(model)
        return ModelCard(
            id=model.entry.name,
            aliases=model.entry.aliases,
            state=state,
            created=self._created,
            context_length=plan.ctx_size // plan.slots if plan else None,
            slots=plan.slots * len(model.replicas) if plan else 0,
            reason=reason,
        )


def availability(model: Model) -> tuple[Literal["loaded", "loading", "failed"], str | None]:
    """Return whether a model can answer, and if it cannot until somebody acts, why."""
    facts = [one.instance.snapshot() for one in (*model.replicas, *model.coming)]
    if any(one.state is State.READY for one in facts):
        return "loaded", None
    if any(one.wanted and one.state is not State.FAILED for one in facts):
        return "loading", None
    causes = [one.cause.sentence for one in facts if one.cause and one.state is State.FAILED]
    return "failed", causes[0] if causes else f"it is stopped (corral start {model.entry.name})"


def proxy_settings(table: ProxyTable) -> ProxySettings:
    """Return the proxy's settings from those of the file."""
    host, _, port = table.listen.rpartition(":")
    return ProxySettings(
        host=host.strip("[]"),
        port=int(port),
        max_body_bytes=table.max_body_bytes,
        connect_timeout_s=table.connect_timeout_s,
        silence_timeout_s=table.silence_timeout_s,
    )
