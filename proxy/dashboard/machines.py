"""`/corral/v1/machine`, the figures of this machine for others; `/corral/v1/machines`, of all.

A client sees its own models and requests, an admin all. Figures of the machine itself are for every
client that may use it, as those of `/health` are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web
from attrs import define, field

from proxy.auth.access import check_admin
from proxy.auth.api_keys import visible_client
from proxy.dashboard.host import DashboardHost
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.requests import Requests
from proxy.errors import Forbidden
from proxy.http.middleware import Routes, json_response
from proxy.nodes.gather import PATHS
from proxy.request.models import ModelInfo, client_models

# No node has such a name.
THIS_MACHINE: Final = "(this machine)"


@define(eq=False, slots=False)
class MachinesEndpoint(Feature):
    _core: Core
    _host: DashboardHost
    _requests: Requests
    _started_at_s: float = field(factory=time.monotonic, init=False)

    def add_routes(self, routes: Routes) -> None:
        routes.add(PATHS["machine"], get=self.answer)
        routes.add(PATHS["caches"], get=self.caches)
        routes.add("/corral/v1/machines", get=self.all)

    def machine(
        self, models: Sequence[ModelInfo] | None = None, client: str | None = None
    ) -> dict[str, Any]:
        """Return the figures of this machine: its models, or these, and a client's requests."""
        core, infos = self._core, self._core.loader.models() if models is None else models
        served = [stats for stats in core.router.instances() if not stats.upstream.node]
        queues = core.router.queues.stats()
        return {
            "version": self._host.version,
            "state": "stopping" if core.server_state.is_draining else "serving",
            "up_s": round(time.monotonic() - self._started_at_s, 1),
            "memory": {name: asdict(memory) for name, memory in self._host.memory().items()},
            "devices": self._host.devices(),
            "models": [
                {
                    "name": info.id,
                    "state": info.state,
                    "cause": info.reason,
                    "slots": sum(
                        stats.upstream.slots
                        for stats in served
                        if stats.upstream.model == info.id and stats.in_service
                    ),
                    "slots_busy": sum(
                        len(stats.leases) for stats in served if stats.upstream.model == info.id
                    ),
                    "queued": queue.interactive + queue.batch
                    if (queue := queues.get(info.id))
                    else 0,
                }
                for info in infos
                if info.is_local
            ],
            "requests": [asdict(request) for request in self._requests.stats(client)],
        }

    async def answer(self, request: web.BaseRequest) -> web.Response:
        models = client_models(self._core.loader, request)
        return json_response(self.machine(models, visible_client(request)))

    async def caches(self, request: web.BaseRequest) -> web.Response:
        """Answer with the places of the prompts of all clients; raises Forbidden."""
        if (client := visible_client(request)) is not None:
            raise Forbidden(f"API key {client!r} is not an admin's (admin = true in its file)")
        return json_response(await self._host.caches())

    async def all(self, request: web.BaseRequest) -> web.Response:
        """Answer an admin with the figures of this machine and of each node, or its problem."""
        check_admin(request)
        nodes = {node.name: node for node in self._host.nodes()}
        asked = {answer.node: answer for answer in await self._host.ask_nodes("machine", {})}
        own = {"name": THIS_MACHINE, "state": "up", "machine": self.machine()}
        others = [
            {
                "name": name,
                "url": node.url,
                "state": node.state,
                "problem": asked[name].problem if name in asked else node.problem,
                "machine": asked[name].answer if name in asked else None,
            }
            for name, node in nodes.items()
        ]
        return json_response({"machines": [own, *others]})
