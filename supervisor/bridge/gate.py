"""What the supervisor needs of the proxy: traffic to instances, and what clients want."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from proxy.engine.slots import Seen
from proxy.engine.upstream import Upstream
from proxy.errors import ProxyError
from proxy.home import chain
from proxy.line.dispatch import Dispatch
from proxy.line.loan import loan
from proxy.line.rates import Timings
from supervisor.errors import DaemonBusy
from supervisor.fleet import caches
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.slots.proof import Had
from supervisor.fleet.slots.restoring import Filled
from supervisor.fleet.steward import Demand
from supervisor.life.facts import InstanceFacts
from supervisor.life.slots import Slot
from supervisor.life.traffic import NotLent, Pulse


class Gate:
    """What instances need of the proxy (supervisor.life.traffic.Traffic).

    Attributes:
        fleet: Set once the fleet is made, which needs the gate first.
    """

    fleet: Fleet

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        dispatch.proved = self.prove
        dispatch.overdue = self.renew

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
            tells_its_end=True,
        )
        self._dispatch.admit(upstream, map(_filled, replica.keeper.begun(facts.run)))

    def withdraw(self, name: str) -> None:
        """Let no more requests come to an instance; those it has go on."""
        self._dispatch.withdraw(name)

    def pulse(self, name: str) -> Pulse:
        """Return what an instance does for clients now."""
        pulse = self._dispatch.pulse(name)
        return Pulse(pulse.held, pulse.awaited, pulse.bytes_heard, pulse.is_silent)

    @asynccontextmanager
    async def lend(self, name: str) -> AsyncIterator[Callable[[], bool]]:
        """Hold a slot of an instance; what the block is given tells whether a client wants it."""
        try:
            async with loan(self._dispatch, name) as is_wanted:
                yield is_wanted
        except ProxyError as error:
            raise NotLent(error.message) from error

    def ended(self, name: str, *, is_crash: bool) -> int:
        """Hear that a process is gone; return how many clients' requests it computed."""
        return self._dispatch.ended(name, is_crash=is_crash)

    async def idle(self, name: str) -> None:
        """Wait until an instance has no request; the caller sets the deadline."""
        await self._dispatch.idle(name)

    async def close(self, name: str) -> None:
        """Break off what an instance still has."""
        await self._dispatch.close(name)

    def renew(self, upstream: Upstream, why: str) -> None:
        """Have an instance restarted whose engine does not stop computing for a client that left.

        An instance that the fleet no longer has is no error.
        """
        for replica in self.fleet.everyone():
            if replica.name == upstream.name:
                replica.instance.overdue(replica.instance.snapshot().run, why)

    def chains(self, name: str, slots: Sequence[Slot]) -> Mapping[int, str]:
        """Return what the proxy calls the conversations in an instance's idle slots."""
        found = self._dispatch.chains(name, [_seen(slot) for slot in slots])
        return {slot: one.word for slot, one in found.items()}

    def prove(self, name: str, slot: int, timings: Timings) -> None:
        """Take in what the first answer in a slot that was filled says of its cache."""
        replica = next((one for one in self.fleet.everyone() if one.name == name), None)
        cached = timings.cached_tokens
        had = Had(cached + timings.prompt_tokens, cached)
        if replica and replica.keeper.doubts(slot, had):
            with suppress(DaemonBusy):  # at the end nothing is looked into any more
                self.fleet.errand(caches.prove(replica, slot, had))


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


def _seen(slot: Slot) -> Seen:
    task = -1 if slot.id_task is None else slot.id_task
    return Seen(slot.id_slot, task, slot.tokens, slot.is_processing)


def _filled(one: Filled) -> chain.Filled:
    kept, task = one.kept, -1 if one.id_task is None else one.id_task
    if kept is None:
        return chain.Filled(one.id_slot, task)
    return chain.Filled(one.id_slot, task, kept.tokens, chain.read_chain(kept.chain))
