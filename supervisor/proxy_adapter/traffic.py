"""What the supervisor needs of the proxy: traffic to instances, and what clients want."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from proxy.errors import ProxyError, UpstreamConnectFailed
from proxy.nodes.nodes import Nodes
from proxy.prompt_cache import fingerprint
from proxy.router.background_lease import background_lease
from proxy.router.router import NoListener, Router
from proxy.upstream.slots import SlotState
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream
from supervisor.admission.controller import AdmissionController
from supervisor.errors import DaemonBusy
from supervisor.fleet import cache_commands
from supervisor.fleet.fleet import Fleet
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.slot_store.restore import RestoredSlot
from supervisor.slot_store.verify import CacheObservation
from supervisor.warmup.background import Activity, LeaseUnavailable


class TrafficAdapter:
    """What instances need of the proxy (supervisor.instance.interfaces.Traffic).

    Attributes:
        fleet: Set once the fleet is made, which needs this adapter first.
    """

    fleet: Fleet

    def __init__(self, router: Router) -> None:
        self._router = router

    def admit(self, facts: InstanceSnapshot) -> None:
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
        self._router.admit(upstream, map(_filled, replica.keeper.restored_slots(facts.run)))

    def withdraw(self, name: str) -> None:
        """Let no more requests come to an instance; those it has go on."""
        self._router.withdraw(name)

    def activity(self, name: str) -> Activity:
        """Return what an instance does for clients now."""
        pulse = self._router.activity(name)
        return Activity(
            pulse.in_flight, pulse.awaiting_upstream, pulse.bytes_received, pulse.is_silent
        )

    @asynccontextmanager
    async def background_lease(self, name: str) -> AsyncIterator[Callable[[], bool]]:
        """Hold a slot of an instance; what the block is given tells whether a client wants it."""
        try:
            async with background_lease(self._router, name) as is_wanted:
                yield is_wanted
        except ProxyError as error:
            raise LeaseUnavailable(error.message) from error

    def ended(self, name: str, *, is_crash: bool) -> int:
        """Hear that a process is gone; return how many clients' requests it computed."""
        return self._router.ended(name, is_crash=is_crash)

    async def wait_idle(self, name: str) -> None:
        """Wait until an instance has no request; the caller sets the deadline."""
        await self._router.wait_idle(name)

    async def close(self, name: str) -> None:
        """Break off what an instance still has."""
        await self._router.close(name)

    def overdue(self, upstream: Upstream, reason: str) -> None:
        """Have an instance restarted whose engine does not stop computing for a client that left.

        An instance that the fleet no longer has is no error.
        """
        for replica in self.fleet.all_replicas():
            if replica.name == upstream.name:
                replica.instance.overdue(replica.instance.snapshot().run, reason)

    def conversation_fingerprints(self, name: str, slots: Sequence[SlotState]) -> Mapping[int, str]:
        """Return what the proxy calls the conversations in an instance's idle slots."""
        found = self._router.conversation_fingerprints(name, slots)
        return {slot: one.encoded for slot, one in found.items()}

    def verify_restore(self, name: str, slot: int, timings: Timings) -> None:
        """Take in what the first answer in a slot that was filled says of its cache."""
        replica = next((one for one in self.fleet.all_replicas() if one.name == name), None)
        cached = timings.cached_tokens
        had = CacheObservation(cached + timings.prompt_tokens, cached)
        if replica and replica.keeper.is_doubtful(slot, had):
            with suppress(DaemonBusy):  # at the end nothing is looked into any more
                self.fleet.spawn(cache_commands.verify(replica, slot, had))


class RouterEvents(NoListener):
    """Passes on what the router reports (proxy.router.router.RouterListener).

    The router is built first, and what it reports to needs the router: `connect` closes the circle.
    """

    def connect(
        self, traffic: TrafficAdapter, admission: AdmissionController, nodes: Nodes
    ) -> None:
        """Pass on to these from now on."""
        self._traffic, self._admission, self._nodes = traffic, admission, nodes

    def idle(self) -> None:
        self._admission.wake()

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None:
        self._nodes.mark_suspect(upstream, error)

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        self._traffic.overdue(upstream, reason)

    def restore_verified(self, name: str, id_slot: int, timings: Timings, /) -> None:
        self._traffic.verify_restore(name, id_slot, timings)


def _filled(one: RestoredSlot) -> fingerprint.RestoredSlot:
    kept, task = one.kept, one.task
    if kept is None:
        return fingerprint.RestoredSlot(one.id_slot, task)
    return fingerprint.RestoredSlot(
        one.id_slot, task, kept.tokens, fingerprint.decode_fingerprint(kept.fingerprint)
    )
