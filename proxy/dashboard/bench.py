"""`/corral/v1/bench`: compares profiles of a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from aiohttp import web
from attrs import define

from proxy.auth.access import check_admin
from proxy.dashboard.host import BenchRunner, BenchWish
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest
from proxy.http.body import read_members
from proxy.http.middleware import Routes, json_response
from proxy.request.request import client_of

_PATH: Final = "/corral/v1/bench"
_MINUTES_MAX: Final = 240
_PROFILES_MAX: Final = 6


@define(eq=False, slots=False)
class BenchEndpoint(Feature):
    """The endpoints, for admins only; they raise SessionRequired and Forbidden for others."""

    _runner: BenchRunner
    _core: Core

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.show, post=self.start)
        routes.add(f"{_PATH}/cancel", post=self.cancel)
        routes.add(f"{_PATH}/report", get=self.report)

    async def show(self, request: web.BaseRequest) -> web.Response:
        check_admin(request)
        return self._answer()

    async def start(self, request: web.BaseRequest) -> web.Response:
        """Begin the comparison in the body; raises as `BenchRunner.start`."""
        check_admin(request)
        with self._core.bodies.share(client_of(request)) as share:
            wish = wish_of(await read_members(request, share))
        await self._runner.start(wish)
        return self._answer()

    async def cancel(self, request: web.BaseRequest) -> web.Response:
        """Cancel the comparison; raises NotFound."""
        check_admin(request)
        self._runner.cancel()
        return self._answer()

    async def report(self, request: web.BaseRequest) -> web.Response:
        """Answer with the report as a text in JSON, which no browser shows as a page."""
        check_admin(request)
        return json_response({"html": await self._runner.report()})

    def _answer(self) -> web.Response:
        job = self._runner.job()
        return json_response({"job": asdict(job) if job else None})


def wish_of(members: dict[str, Any]) -> BenchWish:
    """Check the members of a body; raises BadRequest."""
    match members:
        case {"model": str(model), "profiles": [_, _, *_] as profiles, "minutes": minutes}:
            names = [name for name in profiles if isinstance(name, str)]
            is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
            workload, force = members.get("workload", ""), members.get("force", False)
            if (
                len({*names}) == len(profiles) <= _PROFILES_MAX
                and is_number
                and 0 < minutes <= _MINUTES_MAX
                and isinstance(force, bool)
                and isinstance(workload, str)
            ):
                return BenchWish(model, tuple(names), workload, minutes, force)
    raise BadRequest(
        f'send {{"model": NAME, "profiles": [NAME, NAME], "minutes": 5}}: 2 to {_PROFILES_MAX} '
        f"profiles, at most {_MINUTES_MAX} minutes"
    )
