"""Passes what the router reports to the supervisor (proxy.router.listener.RouterListener)."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.auth.token_limits import TokenLimits
from proxy.errors import UpstreamConnectFailed
from proxy.nodes.nodes import Nodes
from proxy.router.slot_use import SlotUse
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream
from supervisor.admission.controller import AdmissionController
from supervisor.fleet.fleet import Fleet
from supervisor.usage.recorder import UsageRecorder


class RouterEvents:
    """The router's listener.

    The router is built first, and those it reports to need the router: `connect` closes the circle.
    """

    def connect(
        self,
        fleet: Fleet,
        admission: AdmissionController,
        nodes: Nodes,
        usage: UsageRecorder,
        token_limits: TokenLimits | None = None,
    ) -> None:
        self._fleet, self._admission, self._nodes = fleet, admission, nodes
        self._usage, self._token_limits = usage, token_limits

    def idle(self) -> None:
        self._admission.wake()

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None:
        self._nodes.mark_suspect(upstream, error)

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        self._fleet.overdue(upstream.name, reason)

    def keep_alive(self, model: str, seconds: float, /) -> None:
        self._admission.keep_alive(model, seconds)

    def restore_verified(self, name: str, tokens: int, timings: Timings, /) -> None:
        self._fleet.restore_verified(name, tokens, timings)

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int, /) -> None:
        self._usage.slots_taken(lease, upstream, slots)

    def slots_freed(self, lease: Hashable, use: SlotUse, /) -> None:
        self._usage.slots_freed(lease, use)
        if self._token_limits and use.client:
            self._token_limits.charge(use.client, use.tokens.total)
