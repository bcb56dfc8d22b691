"""Which handler answers which path and method, and a response of our own whose body is JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import orjson
from aiohttp import web

from proxy.errors import MethodNotAllowed, NotFound


def json_response(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# The `{id}` of the path that a request matched.
PATH_ID: Final = web.RequestKey("path_id", str)

_ID: Final = "{id}"


class Routes:
    """Routes, and those of `beneath` for what none of them matches."""

    def __init__(self, beneath: Routes | None = None) -> None:
        self._beneath = beneath
        self._exact: dict[str, dict[str, Handler]] = {}
        self._with_id: list[tuple[str, str, dict[str, Handler]]] = []

    def add(
        self,
        path: str,
        *,
        get: Handler | None = None,
        post: Handler | None = None,
        delete: Handler | None = None,
    ) -> None:
        """Route a path; of two paths with `{id}` that match a request, the one added first.

        Args:
            path: `{id}` in it stands for any text, slashes included.
            get: Answers GET and HEAD.
            post: Answers POST.
            delete: Answers DELETE.
        """
        given = {"GET": get, "HEAD": get, "POST": post, "DELETE": delete}
        handlers = {method: handler for method, handler in given.items() if handler}
        prefix, is_open, suffix = path.partition(_ID)
        if is_open:
            self._with_id.append((prefix, suffix, handlers))
        else:
            self._exact.setdefault(path, {}).update(handlers)

    def find(self, request: web.BaseRequest) -> Handler:
        """The handler of a request.

        Raises:
            NotFound: No route has its path.
            MethodNotAllowed: The routes that do have another method.
        """
        path = request.rel_url.path_safe  # decoded, but for %2F and %25
        handlers = self._exact.get(path) or self._find_with_id(request, path)
        if handler := handlers.get(request.method):
            return handler
        if not handlers and self._beneath:
            return self._beneath.find(request)
        if not handlers:
            raise NotFound("no such endpoint; GET /v1/models lists the models")
        raise MethodNotAllowed(request.method, request.path, sorted(handlers))

    def _find_with_id(self, request: web.BaseRequest, path: str) -> dict[str, Handler]:
        for prefix, suffix, handlers in self._with_id:
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                encoded = path[len(prefix) : len(path) - len(suffix)]
                request[PATH_ID] = encoded.replace("%2F", "/").replace("%25", "%")
                return handlers
        return {}
