"""A response of our own whose body is JSON."""

from __future__ import annotations

import orjson
from aiohttp import web


def json_response(content: object) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")
