"""Where the two packages meet: a READY instance becomes an upstream of the proxy, and back.

Instances steer traffic through `Gate`, the proxy asks for models through `Catalogue`. Neither
package knows the other: this file knows both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proxy.carry.variant import Variant
from proxy.engine.slots import Seen
from proxy.engine.upstream import Upstream
from proxy.errors import BadRequest, Misconfigured, ProxyError, Unavailable, UnknownModel
from proxy.gate.door import check
from proxy.gate.guard import is_loopback
from proxy.gate.keyfile import Key, read_keys
from proxy.home import chain
from proxy.home.openings import Opening
from proxy.line.dispatch import Dispatch
from proxy.line.loan import loan
from proxy.loader import ModelCard, Warmed
from proxy.nodes.secret import read_key
from proxy.nodes.settings import NodeSettings
from proxy.settings import ProxySettings
from supervisor.errors import CorralError, DaemonBusy, SettingsInvalid
from supervisor.events import Emit, EventStream
from supervisor.fleet import caches
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.learned import keep
from supervisor.fleet.presence import availability
from supervisor.fleet.replica import Model, Replica
from supervisor.fleet.slots.restoring import Filled
from supervisor.fleet.steward import Demand, Steward
from supervisor.fleet.workshop import Workshop
from supervisor.life import prompts
from supervisor.life.facts import InstanceFacts
from supervisor.life.slots import Slot
from supervisor.life.traffic import NotLent, Pulse
from supervisor.settings import NodeTable, ProxyTable, VariantTable


class Gate:
    """What instances need of the proxy (supervisor.life.traffic.Traffic).

    Attributes:
        fleet: Set once the fleet is made, which needs the gate first.
    """

    fleet: Fleet

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        dispatch.proved = self.prove

    def admit(self, facts: InstanceFacts) -> None:
        """Let requests come to an instance, knowing what it was begun with."""
        model, replica = self.fleet.models[facts.model], self.fleet.replica(facts.name)
        plan = replica.plan
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
            can_name_slots=plan is not None and plan.has_own_slots,
        )
        self._dispatch.admit(upstream, map(_filled, replica.keeper.begun(facts.run)))

    def withdraw(self, name: str) -> None:
        """Let no more requests come to an instance; those it has go on."""
        self._dispatch.withdraw(name)

    def pulse(self, name: str) -> Pulse:
        """Return what an instance does for clients now."""
        pulse = self._dispatch.pulse(name)
        return Pulse(pulse.held, pulse.awaited, pulse.bytes_heard)

    @asynccontextmanager
    async def lend(self, name: str) -> AsyncIterator[Callable[[], bool]]:
        """Hold a slot of an instance; what the block is given tells whether a client wants it."""
        try:
            async with loan(self._dispatch, name) as is_wanted:
                yield is_wanted
        except ProxyError as error:
            raise NotLent(error.message) from error

    async def idle(self, name: str) -> None:
        """Wait until an instance has no request; the caller sets the deadline."""
        await self._dispatch.idle(name)

    async def close(self, name: str) -> None:
        """Break off what an instance still has."""
        await self._dispatch.close(name)

    def chains(self, name: str, slots: Sequence[Slot]) -> Mapping[int, str]:
        """Return what the proxy calls the conversations in an instance's idle slots."""
        found = self._dispatch.chains(name, [_seen(slot) for slot in slots])
        return {slot: one.word for slot, one in found.items()}

    def prove(self, name: str, slot: int, cached: int) -> None:
        """Take in what the first answer in a slot that was filled says of its cache."""
        replica = next((one for one in self.fleet.everyone() if one.name == name), None)
        if replica and replica.keeper.doubts(slot, cached):
            with suppress(DaemonBusy):  # at the end nothing is looked into any more
                self.fleet.errand(caches.prove(replica, slot, cached))


def _seen(slot: Slot) -> Seen:
    task = -1 if slot.id_task is None else slot.id_task
    return Seen(slot.id_slot, task, slot.tokens, slot.is_processing)


def _filled(one: Filled) -> chain.Filled:
    kept, task = one.kept, -1 if one.id_task is None else one.id_task
    if kept is None:
        return chain.Filled(one.id_slot, task)
    return chain.Filled(one.id_slot, task, kept.tokens, chain.read_chain(kept.chain))


class Callers:
    """What the steward needs of the proxy (supervisor.fleet.steward.Clients)."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def demand(self, model: str) -> Demand:
        """Return what clients have and want of a model."""
        found = self._dispatch.demand(model)
        return Demand(found.waiting, found.working, found.ended_at_s, found.cached_tokens)

    def hold(self, model: str) -> None:
        """Have all requests for a model wait in line."""
        self._dispatch.hold(model)

    def release(self, model: str) -> None:
        """Let them go on."""
        self._dispatch.release(model)


class Reader:
    """What the proxy needs of whoever has prompts read ahead (proxy.loader.Reader)."""

    def __init__(self, fleet: Fleet, gate: Gate, emit: Emit) -> None:
        self._fleet = fleet
        self._gate = gate
        self._emit = emit

    def learns(self, model: str) -> bool:
        """Return whether openings of a model's conversations are learned."""
        return self._fleet.workshop.learns(model)

    def learn(self, model: str, opening: Opening) -> None:
        """Keep what conversations of a model begin with; a daemon that ends does not any more."""
        learned = self._fleet.workshop.learned
        with suppress(DaemonBusy):
            self._fleet.errand(keep(learned, model, opening.body, opening.tokens, self._emit))

    async def warm(self, model: str, body: Mapping[str, Any]) -> list[Warmed]:
        """Have every instance of a model that is up read a prompt; clients come first.

        Raises:
            BadRequest: The body is no chat request, or an instance refused it.
            Unavailable: None is up, or one did not come to it.
        """
        try:
            prompt = prompts.of_request("in the body", body)
            found = await caches.warm(self._replicas(model), prompt, self._gate)
        except SettingsInvalid as error:
            raise BadRequest(f"{error.message}; {error.hint}") from error
        if isinstance(found, SettingsInvalid):
            raise BadRequest(found.message)
        if isinstance(found, CorralError):
            raise Unavailable(f"{found.message}; {found.hint}", retry_after_s=10)
        return [Warmed(one.instance, one.tokens, one.cached_tokens) for one in found]

    def _replicas(self, name: str) -> tuple[Replica, ...]:
        model = self._fleet.models.get(name)  # it may be configured no more by now
        return model.replicas if model else ()


class Catalogue:
    """What the proxy needs of the fleet (proxy.loader.Loader).

    Attributes:
        created: When it was made: Unix time in whole seconds.
    """

    def __init__(self, fleet: Fleet, steward: Steward, events: EventStream) -> None:
        self._fleet = fleet
        self._steward = steward
        self._events = events
        self.created = int(datetime.now(tz=UTC).timestamp())
        self._workshop: Workshop | None = None
        self._variants: dict[str, dict[str, Variant]] = {}

    def models(self) -> list[ModelCard]:
        """Return every configured model, up or not."""
        self._read_variants(self._fleet.workshop)
        models = self._fleet.models.values()
        return [self._card(model) for model in models if model.is_configured]

    async def ensure_ready(self, model: str) -> None:
        """Have a model brought up, and wait until it serves; the caller sets the deadline.

        Raises:
            Unavailable: It will not: stopped, failed, or without memory for it.
            UnknownModel: It is configured no more.
        """
        found = self._fleet.models.get(model)
        if found is None or not found.is_configured:  # since the request was read
            raise UnknownModel(model, [card.id for card in self.models()])
        with self._steward.calling(found), self._events.listen() as changes:
            while availability(found)[0] in {"loading", "unloaded"}:
                await changes.next()
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
            created=self.created,
            context_length=plan.ctx_size // plan.slots if plan else None,
            slots=plan.slots * len(model.replicas) if plan else 0,
            reason=reason,
            variants=self._variants.get(model.entry.name, {}),
        )

    def _read_variants(self, workshop: Workshop) -> None:
        """Take in the variants of these settings, where that was not done yet."""
        if workshop is not self._workshop:
            self._workshop = workshop
            self._variants = {
                model: {name: _variant(one) for name, one in workshop.variants(model).items()}
                for model in workshop.entries
            }


def _variant(table: VariantTable) -> Variant:
    return Variant(table.defaults, table.set, frozenset(table.strip))


def node_settings(tables: Mapping[str, NodeTable]) -> list[NodeSettings]:
    """Return what is set for each node, with its key.

    Raises:
        SettingsInvalid: The file of a key is not there, others may read it, or it holds no key.
    """
    with explained():
        return [
            NodeSettings(
                name=name,
                url=table.url,
                api_key=read_key(table.key_file) if table.key_file else "",
                models=frozenset(table.models),
                slots=table.slots,
                is_spare=table.local_first,
            )
            for name, table in tables.items()
        ]


def proxy_settings(table: ProxyTable) -> ProxySettings:
    """Return the proxy's settings from those of the file.

    Raises:
        SettingsInvalid: An origin, a host or the file of API keys is wrong.
    """
    host, _, port = table.listen.rpartition(":")
    settings = ProxySettings(
        host=host.strip("[]"), port=int(port), **table.model_dump(exclude={"listen"})
    )
    with explained():
        check(settings)
    return settings


def api_keys(path: Path) -> tuple[Key, ...]:
    """Return the API keys of a file.

    Raises:
        SettingsInvalid: It is not there, others may read it, or something in it is wrong.
    """
    with explained():
        return read_keys(path)[0]


def is_open_to_all(table: ProxyTable) -> bool:
    """Return whether machines besides this one may ask, without a key."""
    host, _, _ = table.listen.rpartition(":")
    return table.keys_file is None and not is_loopback(host.strip("[]"))


@contextmanager
def explained() -> Iterator[None]:
    """Let what the proxy cannot work with become an error of the settings.

    Raises:
        SettingsInvalid: Its own error was Misconfigured.
    """
    try:
        yield
    except Misconfigured as error:
        raise SettingsInvalid(error.message, hint=error.hint) from error
