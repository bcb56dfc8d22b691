"""Lists requests in flight, and cancels them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from proxy.errors import NotFound, RequestCancelled
from proxy.requests.snapshot import RequestStats, snapshot
from proxy.router.in_flight import InFlightRequest, ServerState
from proxy.router.open_request import OpenRequest
from proxy.router.router import Router


class Requests:
    def __init__(self, router: Router, server_state: ServerState) -> None:
        self._router = router
        self._server_state = server_state

    def stats(self, client: str | None = None) -> list[RequestStats]:
        """The requests in flight, oldest first; of one client, where one is given."""
        instances, positions = self._router.instances(), self._router.queue_positions()
        requests = [what for _, what in self._in_flight(client)]
        return snapshot(requests, instances, positions, time.monotonic())

    def cancel(self, request_id: str, client: str | None = None) -> None:
        """End a request with an error, in whatever phase it is.

        Raises:
            NotFound: None in flight has the id, or it is another client's.
        """
        found = [
            one for one, what in self._in_flight(client) if what.record.request_id == request_id
        ]
        if not found:
            raise NotFound(f"no request in flight has the id {request_id}")
        for one in found:
            one.abort(RequestCancelled("the request was cancelled by an operator"))

    def _in_flight(self, client: str | None) -> Iterator[tuple[InFlightRequest, OpenRequest]]:
        for one in self._server_state.in_flight:
            if one.open_request and client in {None, one.open_request.client}:
                yield one, one.open_request
